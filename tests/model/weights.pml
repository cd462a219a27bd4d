/* Weights on their way in while a head is restored: what the engine does (server/engine: head/weight_store, head/head_checkpoint) and how
 * writers use it. A write is begun, sent in two halves and committed; the device publishes it once it comes to that, and is busy
 * with nothing else while it restores. Whoever begins a write drops another's that is not being published. Checkpoints, restores,
 * drains, kills and lost answers may come at any moment.
 *
 * Content of weights: the number of the write they are of, or 0 for those that the head had first.
 *
 * Properties: the asserts; no invalid end state, so every writer hears what became of its write; and no cycle (pan -l).
 */
#ifndef WRITERS
#define WRITERS 2
#endif
#ifndef WRITES
#define WRITES 3 /* of all writers together */
#endif
#ifndef FAULTS
#define FAULTS 3
#endif

#define BIT(number) (1 << (number))
#define BOTH 3 /* halves */

/* --- The server --- */
byte version = 1, content;
byte staged, halves; /* the write that is under way, 0 if there is none, and what of it has arrived */
bool publishing;     /* its commit waits for the device */
chan tasks = [WRITES] of { byte }; /* of the device: writes to be published */
bool restoring;
byte last_committed, last_version; /* for repeated commits */
byte undone;                       /* a set of writes, of which this process knows that a restore undid them */

/* --- The disk --- */
byte saved;

/* --- The writers --- */
#define NONE 0
#define OK 1
#define ABORTED 2
#define NOT_FOUND 3
#define LOST 4
byte answer[WRITES + 1]; /* to the commit */
byte begun;
byte finished; /* writers */
byte faults = FAULTS;

/* --- What really happened --- */
byte epoch; /* goes up when the head becomes what a checkpoint has */
byte epoch_of[WRITES + 1]; /* when the write began */
byte asked, published, restored_over; /* sets of writes; the last one of this process */
byte version_of[WRITES + 1];
byte latest; /* the write published last, unless it was undone */

hidden byte i;

inline publish(id) {
  if
#ifdef BUG_PUBLISH_WHATEVER_IS_STAGED
  :: staged == 0
  :: else -> id = staged;
#else
  :: staged != id /* a restore has dropped it */
  :: else ->
#endif
    assert(halves == BOTH && (asked & BIT(id))); /* nothing is seen of a write before its commit */
    assert(!(published & BIT(id)));              /* never twice */
    assert(epoch_of[id] == epoch);               /* none of a time before the restore */
    version++;
    content = id;
    published = published | BIT(id);
    version_of[id] = version;
    latest = id;
#ifndef BUG_COMMIT_FORGOTTEN
    last_committed = id;
    last_version = version;
#endif
    publishing = false;
    staged = 0;
    halves = 0;
    if
    :: answer[id] == NONE -> answer[id] = OK
    :: else
    fi
  fi
}

inline commit(id) {
  asked = asked | BIT(id);
  if
  :: id == last_committed ->
    assert(version_of[id] == last_version);
    answer[id] = OK
  :: id != last_committed && staged == id ->
    assert(halves == BOTH);
    answer[id] = NONE;
    if
    :: !publishing ->
      publishing = true;
      tasks!id
    :: else
    fi
  :: id != last_committed && staged != id && (undone & BIT(id)) -> answer[id] = ABORTED
  :: else ->
    assert(latest != id);                 /* it is not there, or somebody has written since */
    assert(!(restored_over & BIT(id)));   /* whoever was undone hears that */
    answer[id] = NOT_FOUND
  fi
}

proctype Writer() {
  byte id, sent;
  do
  :: d_step {
      begun < WRITES && !publishing ->
      begun++;
      id = begun;
      sent = 0;
      staged = id;
      halves = 0;
      epoch_of[id] = epoch
    };
    do
    :: d_step { /* rows; whoever hears that the write is not under way begins another one */
        sent != BOTH && staged == id ->
        sent = sent * 2 + 1;
        halves = sent
      }
    :: sent != BOTH && staged != id -> break
    :: d_step { sent == BOTH -> commit(id) };
      answer[id] != NONE;
      if
      :: answer[id] == OK -> assert(published & BIT(id)); break
      :: answer[id] == ABORTED -> assert(epoch_of[id] != epoch); break
      :: answer[id] == NOT_FOUND -> break
      :: answer[id] == LOST /* the commit is repeated */
      fi
    od
  :: d_step { begun == WRITES -> finished++ } -> break
  od
}

proctype Device() {
  byte id;
end:
  do
  :: atomic {
      !restoring && nempty(tasks) ->
      tasks?id;
      d_step { publish(id) }
    }
  :: finished == WRITERS && empty(tasks) -> break
  od
}

/* Who waits for an answer hears that the connection broke. */
inline lose_answers() {
  i = 1;
  do
  :: i > WRITES -> break
  :: else ->
    if
    :: answer[i] == NONE && (asked & BIT(i)) -> answer[i] = LOST
    :: else
    fi;
    i++
  od;
  skip
}

inline forget_process() {
  staged = 0;
  halves = 0;
  publishing = false;
  undone = 0;
  restored_over = 0;
  lose_answers()
}

proctype Operator() {
  byte id;
end:
  do
  :: d_step { faults > 0 && !restoring && saved != content -> saved = content }

  /* RestoreCheckpoint, from when there is no way back until everybody sees it. */
  :: d_step { faults > 0 && !restoring -> faults--; restoring = true }
  :: d_step {
      restoring ->
      restoring = false;
      epoch++;
      version++;
      content = saved;
      restored_over = restored_over | (latest -> BIT(latest) : 0) | (staged -> BIT(staged) : 0);
      latest = 0;
#ifndef BUG_UNDONE_FORGOTTEN
      undone = undone | (last_committed -> BIT(last_committed) : 0) | (staged -> BIT(staged) : 0);
#endif
      last_committed = 0;
      if
#if defined(BUG_STAGED_SURVIVES)
      :: true
#elif defined(BUG_PUBLISHING_SURVIVES)
      :: publishing
#endif
      :: else ->
        if
        :: publishing && answer[staged] == NONE -> answer[staged] = ABORTED
        :: else
        fi;
        staged = 0;
        halves = 0;
        publishing = false
      fi
    }

  /* SIGTERM: what was accepted is finished, and the next start goes on without what was only staged. */
  :: d_step {
      faults > 0 && !restoring && empty(tasks) ->
      faults--;
#ifdef BUG_DRAIN_FORGETS
      last_committed = 0;
#endif
      forget_process()
    }

  /* kill -9: the next start has the checkpoint. */
  :: d_step {
      faults > 0 ->
      faults--;
      restoring = false;
      do
      :: nempty(tasks) -> tasks?i
      :: empty(tasks) -> break
      od;
      epoch++;
      version++;
      content = saved;
      latest = 0;
      last_committed = 0;
      forget_process()
    }

  :: d_step { faults > 0 && asked -> faults--; lose_answers() } /* the connection breaks */
  :: finished == WRITERS -> break
  od
}

init {
  atomic {
    byte w = 0;
    do
    :: w < WRITERS -> run Writer(); w++
    :: else -> break
    od;
    run Device();
    run Operator()
  }
}
