/* A group of three ranks, as server/engine/device/sharded and the control stream have it, and the parent that supervises it. The
 * leader has every rank do the same in the same order: batches, of which it may have two under way, reads, steps and checkpoints. What
 * ranks do together (a collective) goes on once all of them have come to it. A process may die, or stand still and perhaps go on later, at any
 * moment; messages of the control stream may arrive late, after the end of the epoch they are of. The parent sees who is dead or silent,
 * kills what is left of the epoch, and starts the next one from the newest checkpoint, until it gives up.
 *
 * Batches are bits. A window has WINDOW of them, the last one what is left, and is consumed by a step.
 *
 * Properties: the asserts; no invalid end state, so nobody waits for ever, and every run ends with all windows consumed or a parent that
 * has given up; and no cycle (pan -l).
 */
#ifndef BATCHES
#define BATCHES 3
#endif
#ifndef WINDOW
#define WINDOW 2
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef SAVES
#define SAVES 1 /* checkpoints, in all epochs */
#endif
#ifndef READS
#define READS 1
#endif

#ifdef BUG_MARK_BEFORE_RANKS
#define MAY_MARK true
#else
#define MAY_MARK (mark < reported[1] && mark < reported[2])
#endif
#ifdef BUG_CHECKPOINT_BEHIND
#define HAS_COME(rank) (arrived[rank] >= command || kind == SAVE)
#else
#define HAS_COME(rank) (arrived[rank] >= command)
#endif
#ifdef BUG_SILENCE_UNNOTICED
#define NOTICED (LIFE(epoch, 0) == DEAD || LIFE(epoch, 1) == DEAD || LIFE(epoch, 2) == DEAD)
#else
#define NOTICED BROKEN(epoch)
#endif

#define RANKS 3
#define MOST 2 /* batches under way */
#define BIT(batch) (1 << ((batch) - 1))
#define ALL ((1 << BATCHES) - 1)
#define UP_TO(batch) ((1 << (batch)) - 1)

/* --- Processes --- */
#define RUNS 0
#define STOPPED 1
#define FROZEN 2 /* never goes on */
#define DEAD 3
#define ID(of_epoch, rank) ((of_epoch) * RANKS + (rank))
#define LIFE(of_epoch, rank) life[ID(of_epoch, rank)]
/* Somebody does not come: the connection breaks, or waiting takes too long. */
#define BROKEN(of_epoch) (LIFE(of_epoch, 0) != RUNS || LIFE(of_epoch, 1) != RUNS || LIFE(of_epoch, 2) != RUNS)
byte life[EPOCHS * RANKS];
byte epoch;
byte faults = FAULTS;
byte ended; /* processes of this epoch */
bool finished, gave_up;

/* --- The control stream --- */
#define BATCH 1
#define READ 2
#define STEP 3
#define SAVE 4
#define QUIT 5
/* By rank: epoch, kind, number of the command, batch. To the leader: epoch, rank, batches applied. What a process that dies has sent
 * stays under way; later messages may overtake it. */
chan commands[RANKS] = [8] of { byte, byte, byte, byte };
chan replies = [8] of { byte, byte, byte };

/* --- Ranks of the present epoch --- */
byte arrived[RANKS]; /* the command that it has come to */
byte dw[RANKS], weights[RANKS]; /* sets of batches */
byte part_dw[RANKS], part_weights[RANKS]; /* as they were then */

/* --- The disk, and the trainer --- */
byte saved_dw, saved_weights;
byte saves = SAVES, reads = READS;

hidden byte i;

inline send(batch) {
  command++;
  arrived[0] = command;
  commands[1]!e,kind,command,batch;
  commands[2]!e,kind,command,batch
}

/* What clients are told is applied. */
inline move_mark() {
  do
  :: mark < own && MAY_MARK ->
    mark++;
    assert(e == epoch);
    assert((dw[0] | weights[0]) & (dw[1] | weights[1]) & (dw[2] | weights[2]) & BIT(mark)) /* every rank has it */
  :: else -> break
  od;
  skip
}

inline step(rank) {
  assert(dw[rank] == (UP_TO(BATCHES) & ~weights[rank]) || dw[rank] == UP_TO(WINDOW)); /* the whole window, and nothing else */
  assert(!(weights[rank] & dw[rank]));                                               /* and never twice */
  weights[rank] = weights[rank] | dw[rank];
  dw[rank] = 0
}

inline forget_parts() {
  for (i : 0 .. RANKS - 1) {
    part_dw[i] = 0;
    part_weights[i] = 0
  };
  skip
}

inline take_parts() {
  assert(part_dw[1] == part_dw[0] && part_weights[1] == part_weights[0]);
  assert(part_dw[2] == part_dw[0] && part_weights[2] == part_weights[0]);
  if
  :: kind == SAVE ->
    saved_dw = part_dw[0];
    saved_weights = part_weights[0]
  :: else
  fi;
  forget_parts()
}

inline report(e, r) {
  if
  :: atomic { LIFE(e, r) == RUNS && kind == BATCH -> replies!e,r,batch }
  :: kind != BATCH
  :: LIFE(e, r) == DEAD -> goto over
  fi
}

inline leave(rank) {
  d_step {
    LIFE(e, rank) = DEAD;
    ended++
  }
}

proctype Leader(byte e) {
  byte command, kind, rank, batch;
  byte started, own, mark; /* batches since the beginning: begun everywhere, added here, applied as clients know */
  byte reported[RANKS];
  byte command_of[BATCHES + 1];
  byte limit; /* the last batch of the window */

  d_step {
    do
    :: started < BATCHES && ((dw[0] | weights[0]) & BIT(started + 1)) -> started++
    :: else -> break
    od;
    own = started;
    mark = started;
    reported[1] = started;
    reported[2] = started;
    limit = ((weights[0] & BIT(1)) -> BATCHES : WINDOW)
  }
  do
  :: atomic { /* a chunk comes */
      LIFE(e, 0) == RUNS && started < limit && started - mark < MOST ->
      started++;
      kind = BATCH;
      send(started);
      kind = 0;
      command_of[started] = command
    }
  :: d_step { /* the device is done with a batch */
      LIFE(e, 0) == RUNS && own < started && arrived[1] >= command_of[own + 1] && arrived[2] >= command_of[own + 1] ->
      own++;
      command_of[own] = 0;
      assert(!((dw[0] | weights[0]) & BIT(own)));
      dw[0] = dw[0] | BIT(own);
      move_mark()
    }
  :: atomic { LIFE(e, 0) == RUNS && own < started && BROKEN(e) -> break } /* or has failed */
  :: atomic {
      LIFE(e, 0) == RUNS && replies??[eval(e), _, _] ->
      replies??eval(e),rank,batch;
      assert(batch == reported[rank] + 1);
      reported[rank] = batch;
      move_mark();
      rank = 0;
      batch = 0
    }
  :: atomic { /* a late reply */
      LIFE(e, 0) == RUNS && e > 0 && replies??[eval(e - 1), _, _] ->
      replies??eval(e - 1),rank,batch;
#ifdef BUG_OLD_REPLY
      reported[rank] = batch;
      move_mark();
#endif
      rank = 0;
      batch = 0
    }
  :: atomic { /* nothing is under way: a task */
      LIFE(e, 0) == RUNS && started == mark && weights[0] != ALL && (reads > 0 || saves > 0 || mark == limit) ->
      if
      :: reads > 0 -> reads--; kind = READ
      :: saves > 0 -> saves--; kind = SAVE
      :: mark == limit -> kind = STEP
      fi;
      part_dw[0] = dw[0];
      part_weights[0] = weights[0];
      send(0)
    };
    if
    :: d_step {
        LIFE(e, 0) == RUNS && arrived[1] >= command && HAS_COME(2) ->
        assert(e == epoch);
        if
        :: kind != STEP -> take_parts()
        :: else ->
          step(0);
          forget_parts();
          limit = BATCHES
        fi;
        kind = 0
      }
    :: atomic { LIFE(e, 0) == RUNS && BROKEN(e) -> break }
    :: LIFE(e, 0) == DEAD -> break
    fi
  :: atomic {
      LIFE(e, 0) == RUNS && weights[0] == ALL ->
      assert(e == epoch);
      kind = QUIT;
      send(0);
      finished = true;
      break
    }
  :: LIFE(e, 0) == DEAD -> break
  od;
  leave(0)
}

inline take(r) {
  assert(sent == epoch); /* nothing of an old epoch has an effect, nor has a process of one */
  if
  :: kind == QUIT -> goto over
  :: kind == READ || kind == SAVE ->
    part_dw[r] = dw[r];
    part_weights[r] = weights[r]
  :: else
  fi;
  arrived[r] = command
}

proctype Other(byte e; byte r) {
  byte kind, command, batch, sent;
idle:
  atomic {
    kind = 0;
    command = 0;
    batch = 0;
    sent = e
  };
  if
  :: atomic {
      LIFE(e, r) == RUNS && commands[r]??[eval(e), _, _, _] ->
      commands[r]??eval(e),kind,command,batch;
      take(r)
    }
  :: atomic { /* a late command */
      LIFE(e, r) == RUNS && e > 0 && commands[r]??[eval(e - 1), _, _, _] ->
      commands[r]??eval(e - 1),kind,command,batch;
#ifdef BUG_OLD_COMMAND
      sent = e - 1;
      take(r)
#else
      goto idle
#endif
    }
  :: atomic { LIFE(e, r) == RUNS && LIFE(e, 0) == DEAD && !commands[r]??[eval(e), _, _, _] -> goto over } /* the leader is gone */
  :: LIFE(e, r) == DEAD -> goto over
  fi;

#ifdef BUG_REPORT_BEFORE_ADDING
  report(e, r);
#endif
  if
  :: d_step {
      LIFE(e, r) == RUNS && arrived[0] >= command && arrived[3 - r] >= command ->
      assert(sent == epoch);
      if
      :: kind == BATCH ->
        assert(!((dw[r] | weights[r]) & BIT(batch)));
        dw[r] = dw[r] | BIT(batch)
      :: kind == STEP -> step(r)
      :: else
      fi
    }
  :: atomic { LIFE(e, r) == RUNS && BROKEN(e) -> goto over }
  :: LIFE(e, r) == DEAD -> goto over
  fi;
#ifndef BUG_REPORT_BEFORE_ADDING
  report(e, r);
#endif
  goto idle;

over:
  leave(r)
}

proctype Parent() {
  byte rank;
  do
  :: atomic { /* the next epoch begins with the newest checkpoint */
      d_step {
        for (i : 0 .. RANKS - 1) {
          arrived[i] = 0;
          dw[i] = saved_dw;
          weights[i] = saved_weights
        };
        forget_parts();
        ended = 0
      };
      run Leader(epoch);
      run Other(epoch, 1);
      run Other(epoch, 2)
    };
    if
    :: finished
    :: !finished && NOTICED
    fi;
    rank = 0;
    do
    :: d_step {
        rank < RANKS ->
#ifdef BUG_NEXT_BEFORE_DEAD
        if
        :: LIFE(epoch, rank) == STOPPED -> ended++ /* it says nothing, so it is taken for dead */
        :: else -> LIFE(epoch, rank) = DEAD
        fi;
#else
        LIFE(epoch, rank) = DEAD;
#endif
        rank++
      }
    :: rank == RANKS && ended >= RANKS -> break /* they are gone */
    od;
    if
    :: finished -> break
    :: !finished && epoch + 1 < EPOCHS -> epoch++
    :: !finished && epoch + 1 == EPOCHS -> gave_up = true; break
    fi
  od;
  assert(finished || gave_up);
  assert(!finished || (weights[0] == ALL && dw[0] == 0))
}

/* kill -9, SIGSTOP and SIGCONT. Ranks 1 and 2 are alike: the first fault is not rank 2's. */
#define MAY_HIT(rank) (faults > 0 && LIFE(epoch, rank) == RUNS && (rank < 2 || faults < FAULTS))
proctype Fate() {
end:
  do
  :: d_step { MAY_HIT(0) -> faults--; LIFE(epoch, 0) = DEAD }
  :: d_step { MAY_HIT(0) -> faults--; LIFE(epoch, 0) = STOPPED }
  :: d_step { MAY_HIT(0) -> faults--; LIFE(epoch, 0) = FROZEN }
  :: d_step { LIFE(epoch, 0) == STOPPED -> LIFE(epoch, 0) = RUNS }
  :: d_step { MAY_HIT(1) -> faults--; LIFE(epoch, 1) = DEAD }
  :: d_step { MAY_HIT(1) -> faults--; LIFE(epoch, 1) = STOPPED }
  :: d_step { MAY_HIT(1) -> faults--; LIFE(epoch, 1) = FROZEN }
  :: d_step { LIFE(epoch, 1) == STOPPED -> LIFE(epoch, 1) = RUNS }
  :: d_step { MAY_HIT(2) -> faults--; LIFE(epoch, 2) = DEAD }
  :: d_step { MAY_HIT(2) -> faults--; LIFE(epoch, 2) = STOPPED }
  :: d_step { MAY_HIT(2) -> faults--; LIFE(epoch, 2) = FROZEN }
  :: d_step { LIFE(epoch, 2) == STOPPED -> LIFE(epoch, 2) = RUNS }
#ifdef BUG_NEXT_BEFORE_DEAD
  :: d_step { epoch > 0 && LIFE(epoch - 1, 0) == STOPPED -> LIFE(epoch - 1, 0) = RUNS }
  :: d_step { epoch > 0 && LIFE(epoch - 1, 1) == STOPPED -> LIFE(epoch - 1, 1) = RUNS }
#else
  :: finished || gave_up -> break
#endif
  od
}

init {
  atomic {
    run Parent();
    run Fate()
  }
}
