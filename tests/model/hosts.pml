/* A group of three ranks on three hosts, as server/rpc/group has it over hosts: nobody sees all of them. Each host has a parent that starts
 * its rank again whenever that has ended, and knows of no other. A rank says hello to the leader, without knowing of which epoch; who has been
 * welcomed to one ends with it. The leader begins an epoch when all have joined, and ends it when it has lost one: by a connection that
 * broke, or by silence. The others do the same with the leader; they may notice it later, so that a rank of an old epoch lives on beside the
 * next one.
 *
 * Connections are TCP: what a direction brings, it brings in order, until it is cut. A direction may stand still, and go on later, while the
 * other one does not. Besides, messages of an old epoch arrive at new processes, as if something between had kept them and sent them
 * again. A welcome may be lost, and a hello repeated. The data between two ranks may stand still in one direction. (ranks.pml has reads, and
 * processes that stand still for ever: here nobody would end one whose host has no other rank.)
 *
 * Batches are bits, as in ranks.pml. Properties: the asserts; no invalid end state; and no cycle (pan -l).
 */
#ifndef BATCHES
#define BATCHES 2
#endif
#ifndef WINDOW
#define WINDOW 1
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef SAVES
#define SAVES 1
#endif

#define RANKS 3
#define MOST 2 /* batches under way */
#define BIT(batch) (1 << ((batch) - 1))
#define ALL ((1 << BATCHES) - 1)
#define UP_TO(batch) ((1 << (batch)) - 1)
#define NONE 255
#define ID(of_epoch, rank) ((of_epoch) * RANKS + (rank))

/* --- What is broken on purpose --- */
#ifdef BUG_MARK_WITHOUT_LOST
#define COUNTS(rank) (mark < reported[rank] || gone[rank])
#else
#define COUNTS(rank) (mark < reported[rank])
#endif
#ifdef BUG_EPOCH_REUSED
#define TAG(of_epoch) 0
#else
#define TAG(of_epoch) (of_epoch)
#endif
#ifdef BUG_SECOND_HELLO
#define MAY_JOIN(rank) true
#else
#define MAY_JOIN(rank) (!joined[rank])
#endif
#ifdef BUG_LEADER_DEAF
#define SILENT_TO_LEADER(rank) (life[rank] != RUNS)
#else
#define SILENT_TO_LEADER(rank) (life[rank] != RUNS || up_stalls[rank])
#endif
#ifdef BUG_RANK_DEAF
#define SILENT_TO_RANK(rank, e) (epoch == (e) && life[0] != RUNS)
#else
#define SILENT_TO_RANK(rank, e) (epoch != (e) || life[0] != RUNS || down_stalls[rank])
#endif

/* --- Processes, by rank --- */
#define RUNS 0
#define STOPPED 1
#define DEAD 2
byte life[RANKS];
byte in_epoch[RANKS] = NONE; /* the epoch that it is in */
byte obeys[RANKS] = NONE; /* whose commands it has executed */
byte dw[RANKS], weights[RANKS]; /* sets of batches */
byte epoch;     /* of the newest leader */
byte faults = FAULTS;
bool finished, gave_up;

/* --- Connections to the newest leader, by rank; 0 is not used --- */
bool hello[RANKS];   /* is under way */
byte welcome[RANKS]; /* one more than its epoch */
bool joined[RANKS];  /* as the leader knows */
bool gone[RANKS];    /* closed or cut */
bool up_stalls[RANKS], down_stalls[RANKS];

/* By rank. Down: epoch, kind, number of the command, batch. Up: epoch, batch that is applied. */
#define BATCH 1
#define STEP 2
#define SAVE 3
#define RESTORE 4
#define QUIT 5
chan down[RANKS] = [4] of { byte, byte, byte, byte };
chan up[RANKS] = [4] of { byte, byte };

/* --- What ranks do together, by epoch and rank: the command to which a rank has come, and what it brought --- */
byte came[EPOCHS * RANKS];
byte part_dw[EPOCHS * RANKS], part_weights[EPOCHS * RANKS];
byte has[EPOCHS * RANKS]; /* every batch that was added there */
/* One rank's data do not reach another one. */
byte mute_from = NONE, mute_to = NONE;
#define HEARS(e, from, to) (came[ID(e, from)] >= command && !(mute_from == (from) && mute_to == (to)))
#define IN(e, rank) (in_epoch[rank] == (e) || welcome[rank] == (e) + 1)
#define MISSES(e, from, to) (!IN(e, from) || life[from] != RUNS || (mute_from == (from) && mute_to == (to)))

/* --- The disk of the leader's host --- */
byte saved_dw, saved_weights;
byte saves = SAVES;

hidden byte ignored[4], i;

inline come(e, rank) {
  came[ID(e, rank)] = command;
  part_dw[ID(e, rank)] = dw[rank];
  part_weights[ID(e, rank)] = weights[rank]
}

inline add(e, rank, batch) {
  assert(!((dw[rank] | weights[rank]) & BIT(batch)));
  dw[rank] = dw[rank] | BIT(batch);
  has[ID(e, rank)] = has[ID(e, rank)] | BIT(batch)
}

inline step(rank) {
  assert(dw[rank] == (UP_TO(BATCHES) & ~weights[rank]) || dw[rank] == UP_TO(WINDOW)); /* the whole window, and nothing else */
  assert(!(weights[rank] & dw[rank]));                                               /* and never twice */
  weights[rank] = weights[rank] | dw[rank];
  dw[rank] = 0
}

inline restore(e, rank) {
  dw[rank] = saved_dw;
  weights[rank] = saved_weights;
  has[ID(e, rank)] = saved_dw | saved_weights
}

/* A process begins, or has ended. */
inline forget(rank) {
  in_epoch[rank] = NONE;
  obeys[rank] = NONE;
  dw[rank] = 0;
  weights[rank] = 0
}

/* --- The leader, and the parent that starts it again --- */

#define LOST(rank) (joined[rank] && (gone[rank] || SILENT_TO_LEADER(rank)))

/* Into a connection that is closed nothing goes. */
inline send_to(rank, tag, batch) {
  if
  :: !gone[rank] -> down[rank]!tag,kind,command,batch
  :: else
  fi
}

inline send(e, batch) {
  command++;
  come(e, 0);
  send_to(1, TAG(e), batch);
  send_to(2, TAG(e), batch)
}

inline move_mark(e) {
  do
  :: mark < own && COUNTS(1) && COUNTS(2) ->
    mark++;
    assert(has[ID(e, 0)] & has[ID(e, 1)] & has[ID(e, 2)] & BIT(mark)) /* every rank had it */
  :: else -> break
  od;
  skip
}

inline take_parts(e) {
  assert(part_dw[ID(e, 1)] == part_dw[ID(e, 0)] && part_weights[ID(e, 1)] == part_weights[ID(e, 0)]);
  assert(part_dw[ID(e, 2)] == part_dw[ID(e, 0)] && part_weights[ID(e, 2)] == part_weights[ID(e, 0)]);
  saved_dw = part_dw[ID(e, 0)];
  saved_weights = part_weights[ID(e, 0)]
}

inline begin_epoch() {
  d_step {
    life[0] = RUNS;
    forget(0);
    in_epoch[0] = e;
    epoch = e;
    for (i : 1 .. RANKS - 1) {
      joined[i] = false;
      gone[i] = false;
      up_stalls[i] = false;
      down_stalls[i] = false;
      reported[i] = 0
    };
    mute_from = NONE;
    mute_to = NONE;
    command = 0;
    kind = 0;
    started = 0;
    own = 0;
    mark = 0
  }
}

proctype Leader() {
  byte e, command, kind, batch;
  byte started, own, mark;
  byte reported[RANKS];
  byte command_of[BATCHES + 1];
  byte limit;

start:
  skip;
  begin_epoch();
  do /* until all have joined */
  :: d_step { life[0] == RUNS && hello[1] && MAY_JOIN(1) -> hello[1] = false; joined[1] = true; gone[1] = false; welcome[1] = e + 1 }
  :: d_step { life[0] == RUNS && hello[2] && MAY_JOIN(2) -> hello[2] = false; joined[2] = true; gone[2] = false; welcome[2] = e + 1 }
  :: atomic { life[0] == RUNS && (LOST(1) || LOST(2)) -> goto over }
  :: atomic { life[0] == RUNS && joined[1] && joined[2] -> break }
  :: life[0] == DEAD -> goto over
  od;
  if
  :: d_step { (saved_dw | saved_weights) != 0 -> kind = RESTORE; command = 0 }
  :: else
  fi;
  if
  :: atomic { life[0] == RUNS && kind == RESTORE -> send(e, 0) }
  :: life[0] == RUNS && kind != RESTORE
  :: life[0] == DEAD -> goto over
  fi;
  if
  :: d_step { life[0] == RUNS && kind == RESTORE && HEARS(e, 1, 0) && HEARS(e, 2, 0) -> restore(e, 0) }
  :: life[0] == RUNS && kind != RESTORE
  :: atomic { life[0] == RUNS && (LOST(1) || LOST(2) || MISSES(e, 1, 0) || MISSES(e, 2, 0)) -> goto over }
  :: life[0] == DEAD -> goto over
  fi;
  d_step {
    kind = 0;
    do
    :: started < BATCHES && ((dw[0] | weights[0]) & BIT(started + 1)) -> started++
    :: else -> break
    od;
    own = started;
    mark = started;
    reported[1] = started;
    reported[2] = started;
    limit = ((weights[0] & BIT(1)) -> BATCHES : WINDOW)
  };
  do
  :: atomic { /* a chunk comes */
      life[0] == RUNS && started < limit && started - mark < MOST ->
      started++;
      kind = BATCH;
      send(e, started);
      kind = 0;
      command_of[started] = command
    }
  :: d_step { /* the device is done with a batch, the data of the others having come */
      life[0] == RUNS && own < started && came[ID(e, 1)] >= command_of[own + 1] && came[ID(e, 2)] >= command_of[own + 1] && mute_to != 0 ->
      own++;
      command_of[own] = 0;
      add(e, 0, own);
      move_mark(e)
    }
  :: d_step {
      life[0] == RUNS && !up_stalls[1] && up[1]??[eval(TAG(e)), _] ->
      up[1]??eval(TAG(e)),batch;
      assert(batch == reported[1] + 1);
      reported[1] = batch;
      move_mark(e);
      batch = 0
    }
  :: d_step {
      life[0] == RUNS && !up_stalls[2] && up[2]??[eval(TAG(e)), _] ->
      up[2]??eval(TAG(e)),batch;
      assert(batch == reported[2] + 1);
      reported[2] = batch;
      move_mark(e);
      batch = 0
    }
#ifndef BUG_EPOCH_REUSED
  :: d_step { /* late ones */
      life[0] == RUNS && e > 0 && up[1]??[eval(TAG(e - 1)), _] ->
      up[1]??eval(TAG(e - 1)),batch;
#ifdef BUG_OLD_APPLIED
      reported[1]++;
      move_mark(e);
#endif
      batch = 0
    }
  :: d_step {
      life[0] == RUNS && e > 0 && up[2]??[eval(TAG(e - 1)), _] ->
      up[2]??eval(TAG(e - 1)),batch;
#ifdef BUG_OLD_APPLIED
      reported[2]++;
      move_mark(e);
#endif
      batch = 0
    }
#endif
#ifdef BUG_SECOND_HELLO
  :: d_step { life[0] == RUNS && hello[1] -> hello[1] = false; gone[1] = false; welcome[1] = e + 1 }
  :: d_step { life[0] == RUNS && hello[2] -> hello[2] = false; gone[2] = false; welcome[2] = e + 1 }
#endif
  :: atomic { life[0] == RUNS && (LOST(1) || LOST(2)) -> goto over }
  :: atomic { life[0] == RUNS && own < started && (MISSES(e, 1, 0) || MISSES(e, 2, 0)) -> goto over } /* a batch fails */
  :: atomic { /* nothing is under way: a task */
      life[0] == RUNS && started == mark && weights[0] != ALL && (saves > 0 || mark == limit) ->
      if
      :: saves > 0 -> saves--; kind = SAVE
      :: mark == limit -> kind = STEP
      fi;
      send(e, 0)
    };
    if
    :: d_step {
        life[0] == RUNS && HEARS(e, 1, 0) && HEARS(e, 2, 0) ->
        if
        :: kind == SAVE -> take_parts(e)
        :: kind == STEP ->
          step(0);
          limit = BATCHES
        fi;
        kind = 0
      }
    :: atomic { life[0] == RUNS && (LOST(1) || LOST(2) || MISSES(e, 1, 0) || MISSES(e, 2, 0)) -> goto over }
    :: life[0] == DEAD -> goto over
    fi
  :: atomic {
      life[0] == RUNS && weights[0] == ALL ->
      assert(dw[0] == 0);
      kind = QUIT;
      send(e, 0);
      finished = true;
      goto end
    }
  :: life[0] == DEAD -> goto over
  od;

over: /* every connection is closed with the process */
  skip;
  d_step {
    assert(e < FAULTS - faults); /* a fault costs one epoch at most */
    life[0] = DEAD;
    forget(0);
    for (i : 0 .. BATCHES) { command_of[i] = 0 };
    batch = 0;
    limit = 0
  };
  if
  :: e + 1 < EPOCHS -> e++; goto start
  :: e + 1 == EPOCHS -> gave_up = true
  fi;
end:
  life[0] = DEAD
}

/* --- Another rank, and the parent that starts it again --- */

#define LEFT_ALONE(rank, e) (gone[rank] || SILENT_TO_RANK(rank, e))

inline take(r, tag) {
  assert(obeys[r] == NONE || obeys[r] == (tag)); /* one leader's commands, and no other's */
  obeys[r] = (tag);
  if
  :: kind == QUIT -> goto end
  :: else -> come(e, r)
  fi
}

proctype Other(byte r) {
  byte e, kind, command, batch;
start:
  skip;
  d_step {
    life[r] = RUNS;
    forget(r);
    hello[r] = true
  };
join:
  if
  :: d_step { life[r] == RUNS && welcome[r] != 0 -> e = welcome[r] - 1; welcome[r] = 0; in_epoch[r] = e }
  :: atomic { life[r] == RUNS && welcome[r] == 0 && !hello[r] -> hello[r] = true; goto join } /* it was cut: again */
  :: atomic { life[r] == RUNS && (finished || gave_up) -> goto end }
  :: life[r] == DEAD -> goto over
  fi;
idle:
  atomic {
    kind = 0;
    command = 0;
    batch = 0
  };
  if
  :: atomic {
      life[r] == RUNS && !(epoch == e && down_stalls[r]) && down[r]??[eval(TAG(e)), _, _, _] ->
      down[r]??eval(TAG(e)),kind,command,batch;
      take(r, e)
    }
  :: atomic { /* a late command */
      life[r] == RUNS && e > 0 && down[r]??[eval(e - 1), _, _, _] ->
      down[r]??eval(e - 1),kind,command,batch;
#ifdef BUG_OLD_COMMAND
      take(r, e - 1)
#else
      goto idle
#endif
    }
  :: atomic { life[r] == RUNS && LEFT_ALONE(r, e) -> goto over }
  :: life[r] == DEAD -> goto over
  fi;
  if
  :: d_step {
      life[r] == RUNS && HEARS(e, 0, r) && HEARS(e, 3 - r, r) ->
      if
      :: kind == BATCH -> add(e, r, batch)
      :: kind == STEP -> step(r)
      :: kind == RESTORE -> restore(e, r)
      :: else
      fi
    }
  :: atomic { life[r] == RUNS && (LEFT_ALONE(r, e) || MISSES(e, 0, r) || MISSES(e, 3 - r, r)) -> goto over }
  :: life[r] == DEAD -> goto over
  fi;
  if
  :: kind != BATCH || (gone[r] && epoch == e)
  :: atomic { life[r] == RUNS && kind == BATCH && !(gone[r] && epoch == e) -> up[r]!TAG(e),batch }
  :: life[r] == DEAD -> goto over
  fi;
  goto idle;

over:
  skip;
  d_step {
    kind = 0;
    command = 0;
    batch = 0;
    gone[r] = true;
    hello[r] = false;
    welcome[r] = 0
  };
#ifdef BUG_TWO_LEADERS
  if
  :: d_step { life[r] == RUNS -> in_epoch[r] = NONE; hello[r] = true }; goto join /* it goes on with what it has */
  :: life[r] != RUNS
  fi;
#endif
  d_step {
    e = 0;
    life[r] = DEAD
  };
  goto start;
end:
  skip;
  d_step {
    life[r] = DEAD;
    in_epoch[r] = NONE;
    hello[r] = false
  }
}

/* --- Fate --- */

/* Ranks 1 and 2 are alike: the first fault is not rank 2's. */
#define MAY_HIT(rank) (faults > 0 && !finished && life[rank] == RUNS && (rank < 2 || faults < FAULTS))
#define CONNECTED(rank) (MAY_HIT(rank) && life[0] == RUNS && joined[rank] && !gone[rank])
#define MAY_MUTE(from, to) (faults > 0 && mute_from == NONE && in_epoch[from] == epoch && in_epoch[to] == epoch)

inline cut(rank) {
  faults--;
  gone[rank] = true;
  welcome[rank] = 0;
  do
  :: nempty(down[rank]) -> down[rank]?ignored[0],ignored[1],ignored[2],ignored[3]
  :: empty(down[rank]) -> break
  od;
  do
  :: nempty(up[rank]) -> up[rank]?ignored[0],ignored[1]
  :: empty(up[rank]) -> break
  od;
  skip
}

inline mute(from, to) {
  faults--;
  mute_from = from;
  mute_to = to
}

proctype Fate() {
end:
  do
  :: d_step { MAY_HIT(0) -> faults--; life[0] = DEAD }
  :: d_step { MAY_HIT(1) -> faults--; life[1] = DEAD }
  :: d_step { MAY_HIT(2) -> faults--; life[2] = DEAD }
  :: d_step { MAY_HIT(0) -> faults--; life[0] = STOPPED }
  :: d_step { MAY_HIT(1) -> faults--; life[1] = STOPPED }
  :: d_step { MAY_HIT(2) -> faults--; life[2] = STOPPED }
  :: d_step { life[0] == STOPPED -> life[0] = RUNS }
  :: d_step { life[1] == STOPPED -> life[1] = RUNS }
  :: d_step { life[2] == STOPPED -> life[2] = RUNS }
  :: d_step { CONNECTED(1) -> cut(1) }
  :: d_step { CONNECTED(2) -> cut(2) }
  :: d_step { CONNECTED(1) && !up_stalls[1] -> faults--; up_stalls[1] = true }
  :: d_step { CONNECTED(2) && !up_stalls[2] -> faults--; up_stalls[2] = true }
  :: d_step { CONNECTED(1) && !down_stalls[1] -> faults--; down_stalls[1] = true }
  :: d_step { CONNECTED(2) && !down_stalls[2] -> faults--; down_stalls[2] = true }
#ifdef HEALING /* what stands still may go on before somebody notices */
  :: d_step { up_stalls[1] -> up_stalls[1] = false }
  :: d_step { up_stalls[2] -> up_stalls[2] = false }
  :: d_step { down_stalls[1] -> down_stalls[1] = false }
  :: d_step { down_stalls[2] -> down_stalls[2] = false }
  :: d_step { mute_from != NONE -> mute_from = NONE; mute_to = NONE }
#endif
  :: d_step { MAY_MUTE(0, 1) -> mute(0, 1) }
  :: d_step { MAY_MUTE(1, 0) -> mute(1, 0) }
  :: d_step { MAY_MUTE(1, 2) -> mute(1, 2) }
  :: d_step { faults < FAULTS && MAY_MUTE(2, 1) -> mute(2, 1) }
  :: (finished || gave_up) && life[0] != STOPPED && life[1] != STOPPED && life[2] != STOPPED -> break
  od
}

init {
  atomic {
    run Leader();
    run Other(1);
    run Other(2);
    run Fate()
  }
}
