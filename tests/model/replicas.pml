/* Replicas of two heads, as docs/decisions/0022-replicas.md has them: each has sessions and a window of its own, and a flush or a step is
 * of all of them. Replica 0 coordinates. An epoch has all replicas or is none: it begins when all of them have said hello, with what they
 * have, and from that all decide alike. A head of which all have the same, unbroken, goes on; of every other one all go back to its newest
 * checkpoint, or it is gone. Windows end when all know that all are alike: seal everywhere, sum everywhere, step and publish everywhere, the
 * coordinator last. An error in between ends the epoch.
 *
 * A process may die, and come back with nothing: the coordinator's disk stays. A connection may break at any moment, and each replica
 * notices when it likes: until then it does what it was told in the epoch, and what it says is heard by who has not noticed either. Nobody
 * says hello before that, nor while it does what it was told: so there is one epoch at a time, and its messages are sets of bits. A process
 * that goes on when another one has its number is in an epoch that all others have left; it hears nothing more. At the coordinator a call
 * that deletes a head ends before it says hello; one that saves or restores a head need not.
 *
 * Each replica has one batch for each window of a head. Batches are bits. Of versions there is no number here: a step and a restore have
 * one each, and generations and restores count those. Properties: the asserts; no invalid end state, so nobody waits for ever; and no cycle
 * (pan -l).
 */
#ifndef REPLICAS
#define REPLICAS 2 /* or 3 */
#endif
#ifndef HEADS
#define HEADS 2 /* or 1 */
#endif
#ifndef STEPS
#define STEPS 1 /* windows of each head: less than 3 */
#endif
#ifndef FLUSHES
#define FLUSHES 0 /* a set of heads, whose windows are flushed; those of the others are stepped */
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef SAVES
#define SAVES 1
#endif
#ifndef ABORTS
#define ABORTS 1
#endif
#ifndef CALLS
#define CALLS 0 /* which restore a head, or delete it */
#endif

#define X(i, h) ((i) * HEADS + (h))
#define B(i) (1 << (i))
#define ALL ((1 << REPLICAS) - 1)
#define BIT(i, window) (1 << ((window) * REPLICAS + (i)))
#define WINDOW(window) (ALL << ((window) * REPLICAS))
#define IS_FLUSH(h) (((FLUSHES) >> (h)) & 1)
#define STEPPED(h, upto) (IS_FLUSH(h) -> 0 : (1 << ((upto) * REPLICAS)) - 1) /* what weights of this generation are made of */

/* --- Replicas --- */
#define OUT 0
#define MET 1    /* all have said hello */
#define AGREED 2 /* and it has done with its heads what follows from that */
#define WHOLE 3  /* and knows that all are alike */
byte at[REPLICAS];
byte history[REPLICAS]; /* 0: none */

/* --- Their heads --- */
#define OPEN 0
#define SEALED 1
#define SUMMED 2
#define STEPPING 3
#define HELD 4 /* by a flush */
#define BEGUN 1
#define OVERWRITTEN 2
#define READY 3
#define EMPTY 1 /* created, and without weights */
#define FILLED 2
byte exists[REPLICAS * HEADS];
byte phase[REPLICAS * HEADS], restoring[REPLICAS * HEADS];
byte generation[REPLICAS * HEADS], restores[REPLICAS * HEADS];
byte weights[REPLICAS * HEADS]; /* the batches that they have, its own slice at first */
byte dw[REPLICAS * HEADS], part[REPLICAS * HEADS] /* of it, on its way to the others */, sum[REPLICAS * HEADS];
bool got[REPLICAS * HEADS]; /* the mark of the session here: its batch is in some replica's dw */
#ifdef BUG_BROKEN_FORGOTTEN
#define BROKEN(x) false
#else
#define BROKEN(x) (phase[x] == STEPPING || restoring[x] >= OVERWRITTEN)
#endif

#ifdef BUG_GENERATIONS_ALONE
#define SAME_WEIGHTS(x, y) (exists[x] != 0 && exists[y] != 0)
#else
#define SAME_WEIGHTS(x, y) (exists[x] == exists[y])
#endif

/* --- The epoch --- */
byte epoch = 1;
bool cut; /* it is over, for who notices */
byte back; /* heads that go back, and have not yet */
byte agreed; /* history */
bool whole; /* told to all others */
byte known; /* by these */
/* Of each head: what all are told to do, and who has; and of what they exchange, whose data are there. */
#define SEAL 1
#define SUM 2
#define STEP 3
#define HOLD 4
#define COMMIT 5
#define ABORT 6
#define REOPEN 7
#define BEGIN 8
#define FINISH 9
#define INSTALL 10
#define DROP 11
byte told[HEADS], done[HEADS], gave[HEADS];
bool refused[HEADS];
byte named[HEADS]; /* the generation that ends */
#ifdef BUG_TWO_ENDINGS
byte busy[REPLICAS]; /* with what is exchanged of a head */
#define NONE_ENDS (told[h] == 0)
#define FREE(i, h) (busy[i] == 0)
#define TAKE(i, h) busy[i] = (h) + 1
#define LET_GO(i) busy[i] = 0
#else
#define NONE_ENDS (told[0] == 0 && told[HEADS - 1] == 0)
#define FREE(i, h) true
#define TAKE(i, h) skip
#define LET_GO(i) skip
#endif

/* --- The coordinator's disk --- */
bool tag[HEADS];
byte tag_generation[HEADS], tag_weights[HEADS], tag_dw[HEADS], tag_got[HEADS];
byte last_restores[HEADS];
byte saves = SAVES, saving /* one more than the head */, saving_in, captured, captured_dw, captured_got;
bool unsaved[HEADS]; /* a save was answered that is not there */

/* --- A call that restores a head or deletes it, at the coordinator --- */
#define RESTORES 1
#define DELETES 2
byte calls = CALLS, call, call_of, call_in;
bool call_last; /* all others have restored it */
#ifdef BUG_DELETION_NOT_AWAITED
#define DELETED true
#else
#define DELETED (call != DELETES)
#endif
#ifdef BUG_RESTORED_FORGOTTEN
bool forgotten[HEADS]; /* what it is to become */
#endif
#define CALLED(h, what) (call == (what) && call_of == (h))

/* --- The trainer of each head: in its window, of the past of so many restores, its clients were told of so many batches --- */
byte window[HEADS], past[HEADS], acked[HEADS];
byte aborts = ABORTS;
byte asked[HEADS], queued[HEADS]; /* how it wants its flush to end, and what the coordinator is to do */

byte faults = FAULTS;
byte excused; /* heads that may have to go back */
bool died; /* all may */
bool over;

hidden byte j, k, y, any, every, together;

#define IN(i) (at[i] >= AGREED)
#define NOT_YET(i, h) (IN(i) && !(done[h] & B(i)))
#define SOMEBODY_IN (at[0] != OUT || at[1] != OUT || at[REPLICAS - 1] != OUT)

/* --- Endings --- */

/* The window of this generation is over here. */
inline begin_window(x) {
  generation[x]++;
  dw[x] = 0;
  got[x] = false;
  sum[x] = 0;
  phase[x] = OPEN
}

inline publish(x, g) {
  begin_window(x);
  assert(weights[x] == STEPPED(g, generation[x])) /* every batch once, and no other */
}

inline seal(i, x, h) {
  if
  :: exists[x] && phase[x] == OPEN && restoring[x] == 0 && generation[x] == named[h] && got[x] -> phase[x] = SEALED
  :: else ->
    assert(restores[x] != past[h]); /* no mark is lost, but by a restore */
    refused[h] = true
  fi;
  done[h] = done[h] | B(i)
}

inline add_up(i, x, h) {
  sum[x] = 0;
  for (j : 0 .. REPLICAS - 1) {
    assert(!(sum[x] & part[X(j, h)]));
    sum[x] = sum[x] | part[X(j, h)]
  };
  phase[x] = SUMMED;
  LET_GO(i);
  done[h] = done[h] | B(i)
}

inline step(i, x, h) {
  assert(!(weights[x] & sum[x])); /* never twice */
  weights[x] = weights[x] | sum[x];
  phase[x] = STEPPING;
  gave[h] = gave[h] | B(i)
}

inline end_flush(x, g) {
  assert(sum[x] == WINDOW(generation[x]));
  if
  :: told[g] == COMMIT -> begin_window(x)
  :: else -> sum[x] = 0; phase[x] = OPEN
  fi
}

/* --- Restores --- */

inline erase(x) {
  exists[x] = 0;
  phase[x] = OPEN;
  restoring[x] = 0;
  generation[x] = 0;
  restores[x] = 0;
  weights[x] = 0;
  dw[x] = 0;
  sum[x] = 0;
  got[x] = false
}

inline install(i, x, g) {
  exists[x] = FILLED;
  generation[x] = tag_generation[g];
  restores[x] = last_restores[g];
  dw[x] = (i == 0 -> tag_dw[g] : 0);
  got[x] = (tag_got[g] >> (i)) & 1;
  sum[x] = 0;
  phase[x] = OPEN;
  restoring[x] = 0
}

/* --- A replica's part in what its head does --- */

proctype Part(byte i; byte h; byte x) {
  do
  :: over -> break
  :: d_step { NOT_YET(i, h) && told[h] == SEAL -> seal(i, x, h) }
  :: d_step {
      NOT_YET(i, h) && told[h] == SUM && phase[x] == SEALED && !(gave[h] & B(i)) && FREE(i, h) ->
      part[x] = dw[x];
      TAKE(i, h);
      gave[h] = gave[h] | B(i)
    }
  :: d_step { NOT_YET(i, h) && told[h] == SUM && phase[x] == SEALED && gave[h] == ALL -> add_up(i, x, h) }
  :: d_step { NOT_YET(i, h) && told[h] == STEP && phase[x] == SUMMED -> step(i, x, h) }
  :: d_step {
      NOT_YET(i, h) && told[h] == STEP && phase[x] == STEPPING && gave[h] == ALL -> /* all rows are there */
      if
      :: i != 0 -> publish(x, h)
      :: else
      fi;
      done[h] = done[h] | B(i)
    }
  :: d_step { NOT_YET(i, h) && told[h] == HOLD && phase[x] == SUMMED -> phase[x] = HELD; done[h] = done[h] | B(i) }
  :: d_step { NOT_YET(i, h) && (told[h] == COMMIT || told[h] == ABORT) && phase[x] == HELD -> end_flush(x, h); done[h] = done[h] | B(i) }
  :: d_step {
      NOT_YET(i, h) && told[h] == REOPEN ->
      if
      :: phase[x] == SEALED -> phase[x] = OPEN
      :: else
      fi;
      done[h] = done[h] | B(i)
    }
  :: d_step {
      NOT_YET(i, h) && told[h] == BEGIN ->
      exists[x] = (exists[x] == 0 -> EMPTY : exists[x]);
      restoring[x] = (restoring[x] == 0 -> BEGUN : OVERWRITTEN);
      done[h] = done[h] | B(i)
    }
  :: d_step {
      NOT_YET(i, h) && told[h] == FINISH && !(gave[h] & B(i)) ->
      assert(restoring[x] != 0);
      restoring[x] = OVERWRITTEN;
      gave[h] = gave[h] | B(i)
    }
  :: d_step {
      NOT_YET(i, h) && told[h] == FINISH && gave[h] == ALL ->
      weights[x] = tag_weights[h];
      restoring[x] = READY;
      done[h] = done[h] | B(i)
    }
#ifdef BUG_INSTALLED_EARLY
  :: d_step { NOT_YET(i, h) && told[h] == INSTALL && restoring[x] == OVERWRITTEN -> install(i, x, h); done[h] = done[h] | B(i) }
#endif
  :: d_step { NOT_YET(i, h) && told[h] == INSTALL && restoring[x] == READY -> install(i, x, h); done[h] = done[h] | B(i) }
  :: d_step { NOT_YET(i, h) && told[h] == DROP -> erase(x); done[h] = done[h] | B(i) }
  :: d_step { /* a save, between two batches */
      IN(i) && saving == h + 1 && saving_in == epoch && !(captured & B(i)) ->
      assert(phase[x] == OPEN && generation[x] == generation[X(0, h)] && restores[x] == restores[X(0, h)]);
#ifdef BUG_PART_NOT_SAVED
      captured_dw = captured_dw | (i == 0 -> dw[x] : 0);
#else
      captured_dw = captured_dw | dw[x];
#endif
      captured_got = captured_got | (got[x] << i);
      captured = captured | B(i)
    }
  :: d_step { /* a client */
      window[h] < STEPS && !(acked[h] & B(i)) && exists[x] == FILLED && phase[x] == OPEN && restoring[x] == 0 &&
        generation[x] == window[h] && restores[x] == past[h] ->
      if
      :: got[x] -> skip /* a repeat */
      :: else -> dw[x] = dw[x] | BIT(i, window[h]); got[x] = true
      fi;
      acked[h] = acked[h] | B(i)
    }
  od
}

/* --- Epochs --- */

/* An epoch begins: all replicas come to the same from what all have said. Nothing of it changes before they meet. */
inline agree() {
  epoch++;
  cut = false;
  back = 0;
  whole = false;
  known = 0;
  together = true;
  for (j : 1 .. REPLICAS - 1) { together = together && history[j] == history[0] };
  agreed = (together && history[0] != 0 -> history[0] : epoch);
#ifdef BUG_GENERATIONS_ALONE
  together = true;
#endif
  for (k : 0 .. HEADS - 1) {
    any = false;
    every = together;
    for (j : 0 .. REPLICAS - 1) {
      y = X(j, k);
      any = any || exists[y] != 0;
      every = every && SAME_WEIGHTS(y, k) && restores[y] == restores[X(0, k)];
      every = every && generation[y] == generation[X(0, k)];
#ifndef BUG_NO_FLUSH
      every = every && (phase[y] == HELD) == (phase[X(0, k)] == HELD);
#endif
#ifdef BUG_OTHERS_BROKEN
      every = every && (j != 0 || !BROKEN(y))
#else
      every = every && !BROKEN(y)
#endif
    };
    if
    :: (any && !every) || (exists[k] != FILLED && tag[k]) -> /* or all have died: replica 0 restores it when it starts */
      assert(died || (excused & B(k))); /* not for a cut while nothing ends */
      excused = excused | B(k);
      back = back | B(k)
    :: else
    fi;
#ifndef BUG_OLD_COMMAND
    told[k] = 0;
    done[k] = 0;
    gave[k] = 0;
    refused[k] = false;
    named[k] = 0;
    for (j : 0 .. REPLICAS - 1) { part[X(j, k)] = 0 }
#endif
  };
  for (j : 0 .. REPLICAS - 1) { at[j] = MET };
  y = 0
}

/* Heads go on, or are abandoned. */
inline go_on_or_abandon(i) {
  for (k : 0 .. HEADS - 1) {
    y = X(i, k);
    if
#ifdef BUG_RESTORED_FORGOTTEN
    :: (back & B(k)) && restoring[y] == READY -> forgotten[k] = true
#endif
    :: (back & B(k)) && BROKEN(y) -> restoring[y] = OVERWRITTEN
    :: else
    fi;
#ifndef BUG_STAYS_SEALED
    if
    :: phase[y] != HELD -> phase[y] = OPEN; sum[y] = 0
    :: else
    fi;
#endif
    if
    :: i == 0 -> asked[k] = 0
    :: else
    fi
  };
  at[i] = AGREED
}

inline leave(i) {
  LET_GO(i);
  for (k : 0 .. HEADS - 1) {
    if
    :: restoring[X(i, k)] == BEGUN -> restoring[X(i, k)] = 0
    :: else
    fi
  };
  at[i] = OUT
}

/* What all are that know that all are alike; not who has left since, or died. */
inline check_alike() {
  for (k : 0 .. HEADS - 1) {
    any = 0;
    every = true;
    for (j : 0 .. REPLICAS - 1) {
      y = X(j, k);
      if
      :: at[j] == OUT -> every = false
      :: else ->
        assert(exists[y] == exists[k] && generation[y] == generation[k] && restores[y] == restores[k] && weights[y] == weights[k]);
        assert(phase[y] == phase[k] && (phase[y] == OPEN || phase[y] == HELD) && restoring[y] == 0);
        assert(exists[y] != EMPTY && (exists[y] == 0 || weights[y] == STEPPED(k, generation[y])));
        assert(!(any & dw[y]));
        any = any | dw[y];
        assert(!exists[k] || restores[k] != past[k] || !(acked[k] & B(j)) || generation[k] > window[k] || got[y]) /* its clients were told */
      fi
    };
    for (j : 0 .. REPLICAS - 1) { assert(!every || got[X(j, k)] == ((any & BIT(j, generation[k])) != 0)) };
    assert(!exists[k] || restores[k] != past[k] || generation[k] >= window[k]) /* and its trainer */
  }
}

proctype Replica(byte i) {
  do
  :: over -> break
  :: d_step { at[i] == MET -> go_on_or_abandon(i) }
  :: d_step { i != 0 && at[i] == AGREED && whole -> at[i] = WHOLE; history[i] = agreed; known = known | B(i) }
  :: d_step { at[i] != OUT && cut -> leave(i) }
  od
}

/* --- The coordinator: which settles an epoch, saves, and ends windows one after the other --- */

#define IS_WHOLE (at[0] == WHOLE)
#define MAY_CALL(h) (IS_WHOLE && calls > 0 && call == 0 && saving == 0 && NONE_ENDS && exists[h] && phase[h] == OPEN)
#define ALL_DONE(h, what) (IN(0) && told[h] == (what) && done[h] == ALL)

inline tell(h, what) {
  told[h] = what;
  done[h] = 0;
  gave[h] = 0
}

/* It does its own part last. */
inline tell_others(h, what) {
  told[h] = what;
  done[h] = B(0);
  gave[h] = 0
}

inline is_over(h) {
  for (k : 0 .. REPLICAS - 1) { part[X(k, h)] = 0 };
  told[h] = 0;
  done[h] = 0;
  gave[h] = 0;
  refused[h] = false;
  named[h] = 0
}

/* It is alike everywhere. */
inline settle_head(h) {
  is_over(h);
  excused = excused & ~B(h);
  back = back & ~B(h)
}

inline begin_call(h, what) {
  calls--;
  call = what;
  call_of = h;
  call_in = epoch;
  excused = excused | B(h)
}

inline end_call() {
  call = 0;
  call_of = 0;
  call_in = 0;
  call_last = false
}

/* Whoever is asked now has it. */
inline check_answered(h) {
  for (j : 0 .. REPLICAS - 1) { assert(at[j] == OUT || generation[X(j, h)] == generation[h]) }
}

inline advance(h) {
  window[h]++;
  acked[h] = 0
}

/* The trainer hears of restores, and replays what its sessions have not. */
inline learn(h) {
  acked[h] = 0;
  for (j : 0 .. REPLICAS - 1) { acked[h] = acked[h] | (got[X(j, h)] << j) };
  past[h] = restores[h];
  window[h] = generation[h]
}

#ifdef BUG_WHOLE_EARLY
#define SETTLED (told[0] == 0 || told[0] == INSTALL) && (back == 0 || told[0] == INSTALL)
#else
#define SETTLED back == 0
#endif
#ifdef BUG_COORDINATOR_FIRST
#define MAY_PUBLISH(h) (IN(0) && told[h] == STEP && (done[h] & B(0)))
#else
#define MAY_PUBLISH(h) ALL_DONE(h, STEP)
#endif
#ifdef BUG_SAVED_IN_AN_ENDING
#define MAY_SAVE(h) (told[h] < BEGIN)
#else
#define MAY_SAVE(h) (told[h] == 0)
#endif

inline end_save() {
  saving = 0;
  saving_in = 0;
  captured = 0;
  captured_dw = 0;
  captured_got = 0
}

proctype Epochs() {
  do
  :: over -> break
  :: d_step { !SOMEBODY_IN && DELETED -> agree() }
  :: d_step { at[0] == AGREED && SETTLED && !whole && call == 0 -> whole = true }
  :: d_step {
      at[0] == AGREED && whole && (known | B(0)) == ALL ->
      check_alike();
      at[0] = WHOLE;
      history[0] = agreed;
      excused = 0;
      died = died && cut
    }
  :: d_step {
      !over && !cut && IS_WHOLE && saving == 0 && call == 0 && told[0] == 0 && told[HEADS - 1] == 0 && window[0] == STEPS &&
        window[HEADS - 1] == STEPS ->
      check_alike();
      over = true
    }
  od
}

proctype Coordinator(byte h) {
  do
  :: over -> break
  /* Back to the newest checkpoint; not while one is saved. */
  :: d_step {
      at[0] == AGREED && (back & B(h)) && NONE_ENDS && saving == 0 && call == 0 ->
      assert(!unsaved[h]);
      if
      :: tag[h] -> last_restores[h]++; tell(h, BEGIN)
      :: else -> erase(h); tell_others(h, DROP)
      fi
    }
  :: d_step { ALL_DONE(h, BEGIN) -> tell(h, FINISH) }
#ifdef BUG_INSTALLED_EARLY
  :: d_step { IN(0) && told[h] == FINISH && (done[h] & B(0)) -> tell_others(h, INSTALL) }
#endif
  :: d_step { ALL_DONE(h, FINISH) -> tell_others(h, INSTALL) }
  :: d_step { ALL_DONE(h, INSTALL) && !CALLED(h, RESTORES) -> install(0, h, h); settle_head(h) }
  :: d_step { ALL_DONE(h, DROP) -> settle_head(h) }

  /* Calls: of a thread that does not leave the epoch with the others. */
  :: d_step {
      MAY_CALL(h) && tag[h] ->
      begin_call(h, RESTORES);
      last_restores[h]++;
      tell(h, BEGIN)
    }
  :: d_step { ALL_DONE(h, INSTALL) && CALLED(h, RESTORES) && !call_last -> call_last = true }
  :: d_step {
      CALLED(h, RESTORES) && call_last ->
#ifdef BUG_RESTORED_FORGOTTEN
      assert(!forgotten[h]);
#endif
      if
      :: restoring[h] == READY -> install(0, h, h)
      :: else
      fi;
      if
      :: IS_WHOLE && call_in == epoch -> settle_head(h)
      :: else
      fi;
      end_call()
    }
  :: d_step { CALLED(h, RESTORES) && !call_last && (at[0] == OUT || call_in != epoch) -> end_call() } /* it fails */
  :: d_step { MAY_CALL(h) -> begin_call(h, DELETES); window[h] = STEPS }
  :: d_step {
      CALLED(h, DELETES) ->
      erase(h);
      tag[h] = false;
      if
      :: IS_WHOLE && call_in == epoch -> tell_others(h, DROP)
      :: else /* it fails */
      fi;
      end_call()
    }

  /* The trainer's calls. */
  :: d_step { IS_WHOLE && exists[h] && restores[h] != past[h] && told[h] == 0 && window[h] < STEPS -> learn(h) }
  :: d_step { IS_WHOLE && !exists[h] && window[h] < STEPS -> window[h] = STEPS } /* it is gone, and the trainer gives up */
  :: d_step { /* a repeat */
      IS_WHOLE && exists[h] && restores[h] == past[h] && told[h] == 0 && generation[h] == window[h] + 1 -> advance(h)
    }
  :: d_step {
      IS_WHOLE && NONE_ENDS && call == 0 && saving != h + 1 && exists[h] && phase[h] == OPEN && acked[h] == ALL &&
        generation[h] == window[h] ->
      named[h] = window[h];
      tell(h, SEAL)
    }
  :: d_step { IS_WHOLE && phase[h] == HELD && asked[h] == 0 -> asked[h] = COMMIT; queued[h] = COMMIT }
  :: d_step { IS_WHOLE && phase[h] == HELD && asked[h] == 0 && aborts > 0 -> aborts--; asked[h] = ABORT; queued[h] = ABORT }
  :: d_step { queued[h] != 0 && !IS_WHOLE -> asked[h] = 0; queued[h] = 0 } /* it is to ask again */
  :: d_step {
      IS_WHOLE && NONE_ENDS && call == 0 && saving != h + 1 && queued[h] != 0 ->
      if
#ifdef BUG_STALE_FATE
      :: phase[h] == HELD -> excused = excused | B(h); tell_others(h, queued[h])
#else
      :: phase[h] == HELD && asked[h] == queued[h] -> excused = excused | B(h); tell_others(h, queued[h])
#endif
      :: else /* who asked was told that it is not done */
      fi;
      queued[h] = 0
    }

  :: d_step {
      ALL_DONE(h, SEAL) ->
      if
      :: !refused[h] -> tell(h, SUM)
#ifdef BUG_REFUSED_STAYS
      :: else -> phase[h] = OPEN; is_over(h); learn(h)
#else
      :: else -> tell_others(h, REOPEN)
#endif
      fi
    }
  :: d_step {
      ALL_DONE(h, REOPEN) ->
      if
      :: phase[h] == SEALED -> phase[h] = OPEN
      :: else
      fi;
      is_over(h);
      learn(h)
    }
  :: d_step {
      ALL_DONE(h, SUM) ->
      excused = excused | B(h);
      if
      :: IS_FLUSH(h) -> tell_others(h, HOLD)
      :: else -> tell(h, STEP)
      fi
    }
  :: d_step {
      MAY_PUBLISH(h) ->
      publish(h, h);
      check_answered(h);
      is_over(h);
      excused = excused & ~B(h);
      if
      :: restores[h] == past[h] -> advance(h)
      :: true -> skip /* the answer is lost */
      fi
    }
  :: d_step { ALL_DONE(h, HOLD) -> phase[h] = HELD; is_over(h); excused = excused & ~B(h) }
  :: d_step {
      ALL_DONE(h, COMMIT) || ALL_DONE(h, ABORT) ->
      assert(asked[h] == 0 || asked[h] == told[h]);
      asked[h] = 0;
      end_flush(h, h);
      check_answered(h);
      is_over(h);
      excused = excused & ~B(h)
    }

  /* Saves, which no epoch waits for. */
  :: d_step {
      IS_WHOLE && saves > 0 && saving == 0 && call == 0 && exists[h] && phase[h] == OPEN && MAY_SAVE(h) ->
      saves--;
      saving = h + 1;
      saving_in = epoch
    }
#ifdef BUG_ANSWERED_BEFORE_DISK
  :: d_step { saving == h + 1 && captured == ALL && !unsaved[h] -> unsaved[h] = true }
#endif
  :: d_step {
      saving == h + 1 && captured == ALL ->
      tag[h] = true;
      tag_generation[h] = generation[h];
      tag_weights[h] = weights[h];
      tag_dw[h] = captured_dw;
      tag_got[h] = captured_got;
      unsaved[h] = false;
      end_save()
    }
  :: d_step { saving == h + 1 && (cut || saving_in != epoch) -> end_save() } /* it fails */
  od
}

/* --- Fate --- */

inline kill(i) {
  faults--;
  cut = true;
  for (k : 0 .. HEADS - 1) {
    erase(X(i, k));
    if
    :: i == 0 -> asked[k] = 0; queued[k] = 0
    :: else
    fi
  };
  at[i] = OUT;
  LET_GO(i);
  history[i] = 0;
  died = true;
  if
  :: i == 0 -> end_save(); end_call()
  :: else
  fi
}

#define MAY_HIT (faults > 0 && !over)
proctype Fate() {
  do
  :: over -> break
  :: d_step { MAY_HIT -> kill(0) }
  :: d_step { MAY_HIT -> kill(1) }
#if REPLICAS == 3
  :: d_step { MAY_HIT -> kill(2) }
#endif
  :: d_step { MAY_HIT && SOMEBODY_IN && !cut -> faults--; cut = true }
  od
}

init {
  atomic {
    d_step {
      for (j : 0 .. REPLICAS - 1) {
        at[j] = WHOLE;
        history[j] = 1;
        for (k : 0 .. HEADS - 1) { exists[X(j, k)] = FILLED }
      }
    };
    for (j : 0 .. REPLICAS - 1) {
      run Replica(j);
      for (k : 0 .. HEADS - 1) { run Part(j, k, X(j, k)) }
    };
    run Epochs();
    for (k : 0 .. HEADS - 1) { run Coordinator(k) };
    run Fate()
  }
}
