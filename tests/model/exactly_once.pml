/* Exactly-once accumulation, flush, step, drain and restore: what the engine does (server/engine: accumulation_ledger,
 * head_sessions, head_flush, head_step, checkpoints) and how a trainer with several lanes uses it (client/src: lane_run,
 * session_link, flush, step). run_model.py has spin verify it, and refute it once a BUG_ switch breaks it.
 *
 * A lane is one stream of numbered chunks, of a session of its own. A chunk carries one item, a piece of the trainer's batch;
 * a lane has CHUNKS items in each of STEPS steps. Once all items of a step are answered the trainer ends the window, by a
 * flush that is committed or by ApplyStep; it may also do so early. What goes wrong, FAULTS times, may do so at any moment.
 *
 * Left out: payloads, credits, leases, weights, several heads. Messages carry no content: that of a sequence does not change
 * within an incarnation, since the trainer sends from its own memory.
 *
 * Properties: the asserts; no invalid end state, so neither a chunk nor a call waits for ever; and no cycle (pan -l), so every
 * run ends, with each item consumed once.
 */
#ifndef LANES
#define LANES 2
#endif
#ifndef CHUNKS
#define CHUNKS 2
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef KILL
#define KILL 0 /* 1: checkpoints and kill -9 too */
#endif
#ifndef DOUBLE
#define DOUBLE 0 /* 1: the head has a second gradient */
#endif

#define ITEMS (CHUNKS * STEPS) /* of a lane */
#define SEQUENCES (ITEMS + FAULTS + 1) /* a rejected item takes one more; there is none of number 0 */
#define BIT(number) (1 << (number))
#define ALL_ITEMS (BIT(LANES * ITEMS) - 1)
#define BAD 16 /* added to an item whose content the server refuses */

/* --- The server. base <= applied <= started <= accepted. --- */
byte accepted[LANES], started[LANES], applied[LANES], base[LANES];
bool attached[LANES];         /* a stream holds the lane, as far as the server knows */
byte owed[LANES];             /* answers under way on this stream: a set of sequences */
byte owed_repeat[LANES];      /* those of them that say REPEATED */
byte refusal[LANES];          /* why the stream is to end, once it is settled */
#define NONE 0
#define WRONG_GENERATION 1
#define GAP 2
byte refused_at[LANES]; /* the generation that the error names */

#define OPEN 0
#define FREEZING 1
#define FROZEN 2
byte window = OPEN;
bool for_step; /* FREEZING: by ApplyStep */
byte generation = 1;
byte marks[LANES]; /* while freezing or frozen: those that the call named */
short gradient;    /* the items that are in dW */
short second;      /* those in the second gradient */
/* For repeated calls: the generation that was committed or consumed by ApplyStep last, with that call's marks. Forgotten here
 * once the trainer has its answer, for it does not ask again. */
byte committed, step_taken;
byte step_marks[LANES];
byte incarnation = 1;

/* What a checkpoint has, and the trainer's own that goes with it. */
byte saved_accepted[LANES], saved_base[LANES];
short saved_gradient, saved_consumed;
byte saved_generation = 1, saved_step;

/* --- The network: of each lane, two messages on the present stream, and one that is left of the stream before. --- */
byte sent1[LANES], sent1_generation[LANES]; /* the first to arrive; sequence 0: none */
byte sent2[LANES], sent2_generation[LANES];
#ifdef BUG_NO_FENCE
byte late[LANES], late_generation[LANES];
#endif

/* --- The trainer's lanes --- */
byte logged[LANES];                /* sequences given out */
byte carries[LANES * SEQUENCES];   /* by sequence: an item, perhaps BAD */
byte answered[LANES];              /* a set of sequences */
byte next_send[LANES];             /* on this stream */
byte may_repeat[LANES];            /* sequences whose answer may say REPEATED */
bool connected[LANES];
byte lane_generation[LANES] = 1;
byte next_item[LANES];
byte redo[LANES]; /* a set of items whose chunks were rejected */

/* --- The trainer's steps --- */
#define WORKING 0
#define ENDING 1 /* BeginFlush or ApplyStep is called, perhaps again and again */
#define READING 2
#define COMMITTING 3
#define ABORTING 4
byte trainer = WORKING;
bool stepping; /* ENDING: by ApplyStep */
bool waiting;  /* ENDING: the call has reached the server and waits there */
byte step;
byte named[LANES];           /* the marks of the call */
byte named_generation;
byte settled[LANES]; /* up to where the trainer knows its items to be consumed */
short read_back;
byte my_incarnation = 1;

short consumed; /* items whose gradient went into the weights */

byte faults = FAULTS;
bool has_saved;
bool done;

#ifdef BUG_DRAIN_REUSE
byte drained_accepted[LANES], drained_base[LANES];
short drained_gradient, drained_consumed;
byte drained_generation, drained_step;
bool drain_kept;
#endif

hidden byte i, n, spare;
hidden short item_bit, believed;

#define ITEM_AT(lane, sequence) carries[(lane) * SEQUENCES + (sequence)]
#define ITEM_BIT(lane, sequence) BIT((lane) * ITEMS + ITEM_AT(lane, sequence))
#define SEEN(lane, sequence) ((answered[lane] >> (sequence)) & 1)
#define ALL_SEEN(lane) (answered[lane] == BIT(logged[lane] + 1) - 2)
#define ROOM_FOR_ANSWERS(lane) (logged[lane] < 2 || SEEN(lane, logged[lane] - 1) || SEEN(lane, logged[lane]))
/* While a frozen window is read, the trainer goes on with its next step. */
#define STEP_NOW (step + (trainer == READING || trainer == COMMITTING || trainer == ABORTING))
#define MAY_BEGIN(lane) (redo[lane] || (next_item[lane] < ITEMS && next_item[lane] / CHUNKS <= STEP_NOW))
#define IDLE(lane) (ALL_SEEN(lane) && !MAY_BEGIN(lane))
#define STEP_DONE(lane) (next_item[lane] >= (step + 1) * CHUNKS && !redo[lane] && ALL_SEEN(lane))
#define SETTLED(lane) (applied[lane] == accepted[lane])
#define STILL_TRUE(lane) (marks[lane] == accepted[lane])
#define NAMED_TRUE(lane) (named[lane] == accepted[lane])
#define NAMED_AS_FLUSH(lane) (named[lane] == marks[lane])
#define NAMED_AS_STEP(lane) (named[lane] == step_marks[lane])
#if LANES == 1
#define EVERY(what) (what(0))
#elif LANES == 2
#define EVERY(what) (what(0) && what(1))
#else
#define EVERY(what) (what(0) && what(1) && what(2))
#endif

#define IS_NEXT(lane, sequence) ((sequence) == accepted[lane] + 1)
#define TAKES(named_by)                                   \
  ((window == OPEN && (named_by) == generation) ||        \
   (DOUBLE && window == FROZEN && (named_by) == generation + 1))
#define WAITS(named_by)                                                            \
  (!TAKES(named_by) && ((window != OPEN && (named_by) == generation + 1) ||        \
                        (window == FREEZING && (named_by) == generation)))
#define CAN_ARRIVE(lane) \
  (sent1[lane] && attached[lane] && refusal[lane] == NONE && !(IS_NEXT(lane, sent1[lane]) && WAITS(sent1_generation[lane])))

/* What was not started leaves the queue. */
inline withdraw(lane) {
#if defined(BUG_KEEP_MARKS)
  started[lane] = accepted[lane]; /* forgotten in the queue, not in the marks */
  applied[lane] = accepted[lane];
#elif defined(BUG_WITHDRAW_STARTED)
  accepted[lane] = applied[lane];
  started[lane] = applied[lane];
#else
  accepted[lane] = started[lane];
#endif
}

inline forget_saved() {
  spare = 0;
  do
  :: spare < LANES ->
    saved_accepted[spare] = 0;
    saved_base[spare] = 0;
    spare++
  :: else -> break
  od;
  saved_gradient = 0;
  saved_consumed = 0;
  saved_generation = 1;
  saved_step = 0;
  has_saved = false
}

/* A fault happens. Once there will be no kill, it does not matter what was saved. */
inline spend() {
  faults--;
  if
  :: KILL && faults == 0 && my_incarnation == incarnation -> forget_saved()
  :: else
  fi
}

inline forget_messages(lane) {
  sent1[lane] = 0;
  sent1_generation[lane] = 0;
  sent2[lane] = 0;
  sent2_generation[lane] = 0;
}

inline forget_answers(lane) {
  owed[lane] = 0;
  owed_repeat[lane] = 0;
  refusal[lane] = NONE;
  refused_at[lane] = 0;
}

/* dW += a chunk. */
inline add(lane, sequence) {
  if
  :: ITEM_AT(lane, sequence) >= BAD
  :: ITEM_AT(lane, sequence) < BAD ->
    item_bit = ITEM_BIT(lane, sequence);
    assert(!((gradient | second | consumed) & item_bit)); /* never twice */
    if
#ifndef BUG_NEXT_IN_FROZEN
    :: DOUBLE && window == FROZEN && sequence > marks[lane] -> second = second | item_bit
#endif
    :: else -> gradient = gradient | item_bit
    fi
  fi
}

/* Submit: a sequence and its generation arrive at the lane. */
inline submit(lane, sequence, of_generation) {
  if
  :: sequence <= accepted[lane] -> /* one that is not started is answered once it is */
    if
    :: sequence <= started[lane] ->
      owed[lane] = owed[lane] | BIT(sequence);
      owed_repeat[lane] = owed_repeat[lane] | BIT(sequence);
#ifdef BUG_REAPPLY
      add(lane, sequence);
#endif
    :: else
    fi
  :: sequence > accepted[lane] + 1 -> refusal[lane] = GAP
  :: IS_NEXT(lane, sequence) && TAKES(of_generation) -> accepted[lane]++
  :: else ->
    refusal[lane] = WRONG_GENERATION;
    refused_at[lane] = generation
  fi
}

inline drop_streams() {
  i = 0;
  do
  :: i < LANES ->
    forget_messages(i);
    forget_answers(i);
#ifdef BUG_NO_FENCE
    late[i] = 0;
    late_generation[i] = 0;
#endif
    attached[i] = false;
    connected[i] = false;
    next_send[i] = 0;
    may_repeat[i] = 0;
    i++
  :: else -> break
  od;
  skip
}

inline forget_marks() {
  i = 0;
  do
  :: i < LANES -> marks[i] = 0; i++
  :: else -> break
  od;
  skip
}

/* The window opens again whole. */
inline reopen() {
  window = OPEN;
#ifndef BUG_ABORT_DROPS
  gradient = gradient | second;
#endif
  second = 0;
  forget_marks()
}

/* The window ends, by a commit or a step, and is exactly what the trainer believes it to be. */
inline consume() {
  i = 0;
  believed = 0;
  do
  :: i < LANES ->
    n = settled[i] + 1;
    do
    :: n > named[i] -> break
    :: n <= named[i] && ITEM_AT(i, n) >= BAD -> n++
    :: else ->
      believed = believed | ITEM_BIT(i, n);
      n++
    od;
    assert(base[i] == settled[i] && marks[i] == named[i]);
    base[i] = marks[i];
    i++
  :: else -> break
  od;
  assert(gradient == believed);
  assert(!(gradient & consumed));
  consumed = consumed | gradient;
#ifdef BUG_COMMIT_DROPS
  gradient = 0;
#else
  gradient = second;
#endif
  second = 0;
  generation++;
  assert(generation <= STEPS + FAULTS + 1);
  window = OPEN
}

inline back_to_work() {
  trainer = WORKING;
  waiting = false;
  stepping = false;
  read_back = 0;
  named_generation = 0;
  i = 0;
  do
  :: i < LANES -> named[i] = 0; i++
  :: else -> break
  od;
  skip
}

/* The trainer hears that its window was consumed. */
inline note_consumed() {
  i = 0;
  believed = true; /* that the step is over */
  do
  :: i < LANES ->
    settled[i] = named[i];
    if
    :: lane_generation[i] <= named_generation -> lane_generation[i] = named_generation + 1
    :: else
    fi;
    n = 1;
    spare = 0; /* items consumed */
    do
    :: n > settled[i] -> break
    :: n <= settled[i] && ITEM_AT(i, n) >= BAD -> n++
    :: else ->
      spare++;
      n++
    od;
    if
    :: spare < (step + 1) * CHUNKS -> believed = false
    :: else
    fi;
    i++
  :: else -> break
  od;
  if
  :: believed -> step++
  :: else
  fi;
  committed = 0;
  step_taken = 0;
  i = 0;
  do
  :: i < LANES -> step_marks[i] = 0; i++
  :: else -> break
  od;
  back_to_work()
}

/* The marks of a call: what the lanes have sent, all of it answered; or what the server tells. */
inline name_marks(as_sent) {
  named_generation = generation;
  i = 0;
  do
  :: i < LANES ->
    named[i] = (as_sent -> logged[i] : accepted[i]);
    i++
  :: else -> break
  od;
  trainer = ENDING
}

inline begin_freezing(by_step) {
  window = FREEZING;
  for_step = by_step;
  waiting = true;
  i = 0;
  do
  :: i < LANES -> marks[i] = named[i]; i++
  :: else -> break
  od;
  skip
}

/* What is above the server's marks is replayed, from the trainer's checkpoint. */
inline learn_that_window_is_lost() {
  my_incarnation = incarnation;
  step = saved_step;
  if
  :: faults == 0 -> forget_saved()
  :: else
  fi;
  back_to_work();
  i = 0;
  do
  :: i < LANES ->
    settled[i] = base[i];
    lane_generation[i] = generation;
    answered[i] = answered[i] & (BIT(accepted[i] + 1) - 1);
    next_item[i] = 0;
    redo[i] = 0;
    n = 1;
    do
    :: n > logged[i] -> break
    :: n <= logged[i] && n > accepted[i] -> ITEM_AT(i, n) = 0; n++
    :: else ->
      if
      :: ITEM_AT(i, n) >= BAD ->
        spare = ITEM_AT(i, n) - BAD;
        if
        :: SEEN(i, n) -> redo[i] = redo[i] | BIT(spare)
        :: else
        fi
      :: else ->
        spare = ITEM_AT(i, n);
        redo[i] = redo[i] & ~BIT(spare)
      fi;
      if
      :: next_item[i] <= spare -> next_item[i] = spare + 1
      :: else
      fi;
      n++
    od;
    logged[i] = accepted[i];
    i++
  :: else -> break
  od;
  skip
}

/* A lane: its client, its stream, and what the device does for it. */
proctype Lane(byte me) {
end:
  do
  :: done -> break

  /* A new stream. The server fences the one before; what that had queued is withdrawn. */
  :: d_step {
      !connected[me] && my_incarnation == incarnation && !IDLE(me) ->
      if
      :: attached[me] -> withdraw(me)
      :: else
      fi;
#ifdef BUG_NO_FENCE
      late[me] = sent1[me];
      late_generation[me] = sent1_generation[me];
#endif
      forget_messages(me);
      forget_answers(me);
      attached[me] = true;
      connected[me] = true;
      assert(accepted[me] <= logged[me]);                /* nobody else sends */
      assert((answered[me] >> (accepted[me] + 1)) == 0); /* not below what was answered */
      if
      :: lane_generation[me] < generation -> lane_generation[me] = generation
      :: else
      fi;
      may_repeat[me] = (BIT(accepted[me] + 1) - 2) & ~answered[me];
      next_send[me] = 1;
      do
      :: next_send[me] <= logged[me] && SEEN(me, next_send[me]) -> next_send[me]++
      :: else -> break
      od;
      skip
    }

  /* The client sends again what was not answered, and then what is new. */
  :: d_step {
      connected[me] && !sent2[me] && next_send[me] <= logged[me] ->
      n = next_send[me];
      do
      :: next_send[me]++;
        if
        :: next_send[me] <= logged[me] && SEEN(me, next_send[me])
        :: else -> break
        fi
      od;
      if
      :: !sent1[me] -> sent1[me] = n; sent1_generation[me] = lane_generation[me]
      :: else -> sent2[me] = n; sent2_generation[me] = lane_generation[me]
      fi
    }
  :: atomic {
      connected[me] && !sent2[me] && next_send[me] == logged[me] + 1 && ROOM_FOR_ANSWERS(me) && MAY_BEGIN(me) ->
      if
      :: true -> i = 0
      :: faults > 0 && !redo[me] -> i = BAD; spend()
      fi;
      d_step {
        logged[me]++;
        next_send[me]++;
        if
        :: redo[me] ->
          n = 0;
          do
          :: redo[me] & BIT(n) -> break
          :: else -> n++
          od;
          ITEM_AT(me, logged[me]) = n;
          redo[me] = redo[me] & ~BIT(n)
        :: else -> ITEM_AT(me, logged[me]) = next_item[me] + i; next_item[me]++
        fi;
        if
        :: !sent1[me] -> sent1[me] = logged[me]; sent1_generation[me] = lane_generation[me]
        :: else -> sent2[me] = logged[me]; sent2_generation[me] = lane_generation[me]
        fi
      }
    }

  /* The server reads a message, if the chunk has not to wait. */
  :: d_step {
      CAN_ARRIVE(me) ->
      submit(me, sent1[me], sent1_generation[me]);
      sent1[me] = sent2[me];
      sent1_generation[me] = sent2_generation[me];
      sent2[me] = 0;
      sent2_generation[me] = 0
    }
  :: d_step { /* the same message is delivered once more */
      faults > 0 && CAN_ARRIVE(me) ->
      spend();
      may_repeat[me] = may_repeat[me] | BIT(sent1[me]);
      submit(me, sent1[me], sent1_generation[me])
    }
  :: d_step { /* two are delivered the wrong way round */
      faults > 0 && sent2[me] && attached[me] && refusal[me] == NONE ->
      spend();
      n = sent1[me];
      sent1[me] = sent2[me];
      sent2[me] = n;
      n = sent1_generation[me];
      sent1_generation[me] = sent2_generation[me];
      sent2_generation[me] = n
    }
#ifdef BUG_NO_FENCE
  :: d_step { /* of a stream that was fenced: should have no effect */
      late[me] != 0 ->
      if
      :: attached[me] && refusal[me] == NONE && !(IS_NEXT(me, late[me]) && WAITS(late_generation[me])) ->
        submit(me, late[me], late_generation[me])
      :: else
      fi;
      late[me] = 0;
      late_generation[me] = 0
    }
#endif

  /* The device starts a chunk, and it is answered; later it is in dW. */
  :: d_step {
      started[me] < accepted[me] ->
      started[me]++;
      if
      :: connected[me] && attached[me] -> owed[me] = owed[me] | BIT(started[me])
      :: else
      fi
    }
  :: d_step {
      applied[me] < started[me] ->
      applied[me]++;
      add(me, applied[me])
    }

  /* An answer arrives. */
  :: d_step {
      connected[me] && owed[me] ->
      n = 1;
      do
      :: owed[me] & BIT(n) -> break
      :: else -> n++
      od;
      assert(!(owed_repeat[me] & BIT(n)) || (may_repeat[me] & BIT(n))); /* else somebody else sent it */
      owed[me] = owed[me] & ~BIT(n);
      owed_repeat[me] = owed_repeat[me] & ~BIT(n);
      if
      :: !SEEN(me, n) && ITEM_AT(me, n) >= BAD -> redo[me] = redo[me] | BIT(ITEM_AT(me, n) - BAD)
      :: else
      fi;
      answered[me] = answered[me] | BIT(n)
    }

  /* A stream that was refused a chunk ends once everything before that is answered and applied. */
  :: d_step {
      connected[me] && refusal[me] != NONE && !owed[me] && SETTLED(me) ->
      if
      :: refusal[me] == WRONG_GENERATION && refused_at[me] == lane_generation[me] ->
        lane_generation[me] = refused_at[me] + 1 /* it is frozen */
      :: refusal[me] == WRONG_GENERATION && refused_at[me] != lane_generation[me] ->
        lane_generation[me] = refused_at[me]
      :: else
      fi;
      forget_messages(me);
      forget_answers(me);
      attached[me] = false;
      connected[me] = false;
      next_send[me] = 0;
      may_repeat[me] = 0
    }

  /* The connection is cut; the server notices when it does, or when another stream comes. */
  :: d_step {
      faults > 0 && connected[me] ->
      spend();
      connected[me] = false;
      next_send[me] = 0;
      may_repeat[me] = 0;
      owed[me] = 0;
      owed_repeat[me] = 0
    }
  :: d_step {
      attached[me] && !connected[me] ->
      withdraw(me);
      forget_messages(me);
      forget_answers(me);
      attached[me] = false
    }
  od
}

/* What the trainer calls, and what the server does about windows. */
proctype Trainer() {
end:
  do
  :: d_step {
      trainer == WORKING && step == STEPS && my_incarnation == incarnation ->
      assert(consumed == ALL_ITEMS && !gradient && !second);
      done = true
    } -> break

  /* Any call tells that the server is another one. */
  :: d_step { my_incarnation != incarnation -> learn_that_window_is_lost() }

  :: atomic {
      trainer == WORKING && step < STEPS && my_incarnation == incarnation && EVERY(STEP_DONE) ->
      if
      :: stepping = true
      :: stepping = false
      fi;
      d_step { name_marks(true) }
    }
  :: atomic { /* early, by the marks that the server tells */
      trainer == WORKING && step < STEPS && my_incarnation == incarnation && faults > 0 ->
      spend();
      if
      :: stepping = true
      :: stepping = false
      fi;
      d_step { name_marks(false) }
    }

  /* BeginFlush. */
  :: d_step {
      trainer == ENDING && !stepping && !waiting && my_incarnation == incarnation ->
      if
      :: named_generation != generation -> assert(false) /* nobody else ends windows */
      :: named_generation == generation && window == OPEN && EVERY(NAMED_TRUE) -> begin_freezing(false)
      :: named_generation == generation && window == OPEN && !EVERY(NAMED_TRUE) -> back_to_work()
      :: named_generation == generation && window == FREEZING ->
        assert(!for_step && EVERY(NAMED_AS_FLUSH));
        waiting = true
      :: else ->
        assert(EVERY(NAMED_AS_FLUSH));
        trainer = READING
      fi
    }
  /* ApplyStep. */
  :: d_step {
      trainer == ENDING && stepping && !waiting && my_incarnation == incarnation ->
      if
#ifndef BUG_STEP_FORGOTTEN
      :: named_generation == step_taken ->
        assert(EVERY(NAMED_AS_STEP));
        note_consumed()
#endif
      :: named_generation == generation && window == OPEN && EVERY(NAMED_TRUE) -> begin_freezing(true)
      :: named_generation == generation && window == OPEN && !EVERY(NAMED_TRUE) -> back_to_work()
      :: named_generation == generation && window == FREEZING ->
        assert(for_step && EVERY(NAMED_AS_FLUSH));
        waiting = true
      :: else -> assert(false)
      fi
    }
  :: d_step { faults > 0 && waiting -> spend(); waiting = false } /* the answer is lost, and the call repeated */

  /* Its turn at the device: everything accepted before is applied. Marks may have gone back since. */
  :: d_step {
      window == FREEZING && EVERY(SETTLED) ->
      if
#ifdef BUG_FREEZE_UNCHECKED
      :: false
#else
      :: !EVERY(STILL_TRUE) ->
        window = OPEN;
        if
        :: waiting -> back_to_work()
        :: else
        fi
#endif
      :: else ->
        if
        :: for_step ->
          step_taken = generation;
          i = 0;
          do
          :: i < LANES -> step_marks[i] = marks[i]; i++
          :: else -> break
          od;
          consume();
          if
          :: waiting -> note_consumed()
          :: else
          fi
        :: else ->
          window = FROZEN;
          if
          :: waiting ->
            waiting = false;
            trainer = READING
          :: else
          fi
        fi
      fi;
      for_step = false;
      if
      :: window == OPEN -> forget_marks()
      :: else
      fi
    }

  /* ReadGradient, if the window is still frozen by this flush. */
  :: d_step {
      trainer == READING && my_incarnation == incarnation ->
      if
      :: window == FROZEN ->
        read_back = gradient;
        trainer = COMMITTING
      :: else -> back_to_work()
      fi
    }
  :: d_step { /* something else fails: the window is reopened */
      (trainer == READING || trainer == COMMITTING) && faults > 0 && my_incarnation == incarnation && !committed ->
      spend();
      read_back = 0;
      trainer = ABORTING
    }

  /* CommitFlush. Its answer may be lost. */
  :: atomic {
      trainer == COMMITTING && my_incarnation == incarnation ->
      if
      :: spare = 0
      :: faults > 0 -> spend(); spare = 1
      fi;
      d_step {
        if
        :: window == FROZEN ->
          assert(read_back == gradient);
          consume();
#ifndef BUG_COMMIT_FORGOTTEN
          committed = named_generation;
#endif
          forget_marks();
          i = 1
        :: window != FROZEN && committed == named_generation ->
#ifdef BUG_COMMIT_TWICE
          gradient = 0;
#endif
          i = 1
        :: else -> i = 0
        fi;
        if
        :: spare == 1
        :: spare == 0 && i == 1 -> note_consumed()
        :: else ->
          assert(named_generation == generation); /* it was not consumed */
          back_to_work()
        fi
      }
    }

  /* AbortFlush. Its answer may be lost. */
  :: atomic {
      trainer == ABORTING && my_incarnation == incarnation ->
      if
      :: spare = 0
      :: faults > 0 -> spend(); spare = 1
      fi;
      d_step {
        if
        :: window == FROZEN -> reopen()
        :: else /* an earlier call, or a drain, has reopened it */
        fi;
        if
        :: spare == 1
        :: else -> back_to_work()
        fi
      }
    }
  od
}

/* Checkpoints, and the ends of servers. */
proctype Operator() {
end:
  do
  :: done -> break

  /* SaveCheckpoint: by the trainer, between its calls; the server does it once everything before is applied. */
  :: d_step {
      KILL && !has_saved && faults > 0 && trainer == WORKING && my_incarnation == incarnation && window == OPEN &&
        EVERY(SETTLED) ->
      has_saved = true;
      i = 0;
      do
      :: i < LANES ->
        saved_accepted[i] = accepted[i];
        saved_base[i] = base[i];
        i++
      :: else -> break
      od;
      saved_gradient = gradient;
      saved_consumed = consumed;
      saved_generation = generation;
      saved_step = step
    }

  /* SIGTERM: everything accepted is finished, a flush is aborted, and the next start goes on. */
  :: d_step {
      faults > 0 && EVERY(SETTLED) ->
      spend();
      if
      :: window == FROZEN -> reopen()
      :: window == FREEZING ->
        window = OPEN;
        for_step = false;
        waiting = false;
        forget_marks()
      :: else
      fi;
      drop_streams();
#ifdef BUG_DRAIN_FORGETS
      committed = 0;
#endif
#ifdef BUG_DRAIN_REUSE
      i = 0;
      do
      :: i < LANES ->
        drained_accepted[i] = accepted[i];
        drained_base[i] = base[i];
        i++
      :: else -> break
      od;
      drained_gradient = gradient;
      drained_consumed = consumed;
      drained_generation = generation;
      drain_kept = true
#endif
    }

  /* kill -9: the next start has the checkpoint, or nothing, and another incarnation. */
  :: d_step {
      KILL && faults > 0 ->
      faults--;
      drop_streams();
      window = OPEN;
      for_step = false;
      waiting = false;
      committed = 0;
      step_taken = 0;
      second = 0;
      forget_marks();
      i = 0;
      do
      :: i < LANES ->
        step_marks[i] = 0;
        accepted[i] = saved_accepted[i];
        base[i] = saved_base[i];
        i++
      :: else -> break
      od;
      gradient = saved_gradient;
      consumed = saved_consumed;
      generation = saved_generation;
#ifndef BUG_NO_INCARNATION
      incarnation++;
#endif
#ifdef BUG_DRAIN_REUSE
      if
      :: drain_kept ->
        i = 0;
        do
        :: i < LANES ->
          accepted[i] = drained_accepted[i];
          base[i] = drained_base[i];
          i++
        :: else -> break
        od;
        gradient = drained_gradient;
        consumed = drained_consumed;
        generation = drained_generation;
        incarnation--
      :: else
      fi;
#endif
      i = 0;
      do
      :: i < LANES ->
        started[i] = accepted[i];
        applied[i] = accepted[i];
        i++
      :: else -> break
      od;
      skip
    }
  od
}

init {
  atomic {
    byte l = 0;
    do
    :: l < LANES -> run Lane(l); l++
    :: else -> break
    od;
    run Trainer();
    run Operator()
  }
}
