/* Replicas of one head, as docs/decisions/0022-replicas.md has them: each has sessions and a window of its own, and a flush or a step is
 * of all of them. Replica 0 coordinates. An epoch has all replicas or is none: the coordinator begins one when every number has said hello,
 * with what it has kept, and decides from that what becomes of the ending that the last epoch left behind. A window's end: seal everywhere,
 * sum everywhere, and only then step, which nothing undoes. Slice s of the optimizer's state is held by replicas s and s + 1.
 *
 * A process may die, and come back with nothing; it may hang, so that another process takes its number, and go on beside it with its old epoch;
 * a connection may break. Messages of an epoch are sets of bits: what was sent may arrive late, several times, or never, if the receiver has
 * left the epoch by then. Each client has one batch for each window, and sends it again, here or to another replica, when its session is gone.
 *
 * Batches are bits. Properties: the asserts; no invalid end state, so nobody waits for ever; and no cycle (pan -l).
 */
#ifndef REPLICAS
#define REPLICAS 2 /* or 3 */
#endif
#ifndef STEPS
#define STEPS 2 /* windows: less than 3 with three replicas */
#endif
#ifndef FLUSHES
#define FLUSHES 0 /* a set of windows, which are flushed; the others are stepped */
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef MOVES
#define MOVES 1 /* of a client whose replica may be alive; from one that has lost its number it moves at no cost */
#endif
#ifndef OLDS
#define OLDS 1 /* processes that live on when another one has their number */
#endif

#define CLIENTS REPLICAS
#define EPOCHS (FAULTS + 2) /* from 1 on; a fault costs one at most */
#define BIT(c, window) (1 << ((window) * CLIENTS + (c)))
#define WINDOW(window) (((1 << CLIENTS) - 1) << ((window) * CLIENTS))
#define IS_FLUSH(window) (((FLUSHES) >> (window)) & 1)
#define OF_STEP(window, upto) (((window) < (upto) && !IS_FLUSH(window)) -> WINDOW(window) : 0)
#define STEPPED(upto) (OF_STEP(0, upto) | OF_STEP(1, upto) | OF_STEP(2, upto)) /* what the weights of this generation are made of */

/* --- What is broken on purpose --- */
#ifdef BUG_SUM_LEFT_OUT
#define PARTS(e, last) (last - 1)
#else
#define PARTS(e, last) (last)
#endif
#ifdef BUG_STEP_BEFORE_SUMMED
#define MAY_STEP(e) (vote[AT(e, 0)] & SUMMED_BIT)
#else
#define MAY_STEP(e) ALL_HEARD(e, SUMMED_BIT)
#endif
#ifdef BUG_ANSWER_EARLY
#define MAY_ANSWER(e) (vote[AT(e, 0)] & ENDED_BIT)
#else
#define MAY_ANSWER(e) ALL_HEARD(e, ENDED_BIT)
#endif
#ifdef BUG_OLD_VOTE
#define HEARD(e, n, what) ((vote[AT(e, n)] | vote[AT(e - 1, n)]) & (what))
#else
#define HEARD(e, n, what) SAID(e, n, what)
#endif
#ifdef BUG_OLD_COMMAND
#define TOLD(i, what) ((told[ep[i]] | told[ep[i] - 1]) & (what))
#else
#define TOLD(i, what) (told[ep[i]] & (what))
#endif

#if REPLICAS == 3
#define ALL_SAID(e, what) (SAID(e, 0, what) && SAID(e, 1, what) && SAID(e, 2, what))
#define ALL_HEARD(e, what) (HEARD(e, 0, what) && HEARD(e, 1, what) && HEARD(e, 2, what))
#define NOBODY_IN (ep[0] == 0 && ep[1] == 0 && ep[2] == 0)
#else
#define ALL_SAID(e, what) (SAID(e, 0, what) && SAID(e, 1, what))
#define ALL_HEARD(e, what) (HEARD(e, 0, what) && HEARD(e, 1, what))
#define NOBODY_IN (ep[0] == 0 && ep[1] == 0)
#endif

/* --- Processes, by slot: one for each number, and the last one for a process whose number another one has by now --- */
#define OLD REPLICAS
#define SLOTS (REPLICAS + 1)
#define NUMBER(i) ((i) == OLD -> old_number : (i))
#define NEXT(s) (((s) + 1) % REPLICAS)
#define BEFORE(s) (((s) + REPLICAS - 1) % REPLICAS)
byte old_number = 255; /* 255: there is none */

#define OPEN 0
#define SEALED 1
#define SUMMED 2
#define STEPPING 3
#define COMMITTING 4 /* a flush: it knows what is to become of it */
#define ABORTING 5
bool holds[SLOTS]; /* the weights, and its two slices */
byte incarnation[SLOTS];
byte ep[SLOTS];       /* the epoch that it is in; 0: none, and it has said hello */
bool welcomed[SLOTS]; /* knows what the epoch has decided */
bool ready[SLOTS];    /* knows that all have done it */
byte phase[SLOTS], generation[SLOTS];
byte dw[SLOTS];
byte own_sum[SLOTS], mirror_sum[SLOTS]; /* of slices i and i - 1 */
byte own[SLOTS], mirror[SLOTS];         /* the batches in these slices' states, and in their weights */
byte third[SLOTS];                      /* and in the weights of slice i + 1, where there are three */

/* --- Epochs: what the coordinator has told all, what each has said, by number --- */
#define READY_BIT 1
#define SEAL_BIT 2
#define SUM_BIT 4
#define STEP_BIT 8
#define UNSEAL_BIT 16
#define COMMIT_BIT 32
#define TO_COMMIT_BIT 64
#define TO_ABORT_BIT 128
#define SETTLED_BIT 1
#define SEALED_BIT 2
#define REFUSED_BIT 4
#define GAVE_BIT 8
#define SUMMED_BIT 16
#define ENDED_BIT 32
#define UNSEALED_BIT 64
#define DECIDED_BIT 128
#define AT(e, n) ((e) * REPLICAS + (n))
#define SAID(e, n, what) (vote[AT(e, n)] & (what))
#define DROP 0   /* the ending that was begun */
#define GO_ON 1  /* with it */
#define COMMIT 2 /* the flush */
byte epoch;
byte told[EPOCHS];
byte vote[EPOCHS * REPLICAS];
byte part[EPOCHS * REPLICAS]; /* of dW, on its way to the others */
byte mark[EPOCHS * REPLICAS], mark_of[EPOCHS * REPLICAS]; /* what SEAL names: batches, and the incarnation that has them */
byte verdict[EPOCHS], target[EPOCHS]; /* and the generation that all have when it is done */
byte fenced[EPOCHS];                  /* numbers whose sessions went elsewhere: their windows are dropped */
bool broken[EPOCHS];

/* --- Coordinators: that of the newest epoch, and that of one which is over --- */
#define IDLE 0
#define JOINING 1
#define READY 2
#define SEALING 3
#define SUMMING 4
#define ENDING 5
#define UNSEALING 6
#define HELD 7 /* by a flush */
#define DECIDING 8
#define NO_FLUSH 255
byte stage[2], of_generation[2], of_flush[2];

/* --- Trainer and clients --- */
byte window;
bool sent[CLIENTS];
byte at[CLIENTS], of_incarnation[CLIENTS]; /* its session */
byte left[CLIENTS * REPLICAS];             /* by number: one more than the incarnation of a session that may have its batch, too */
byte answered; /* the generation that the last call was answered with */
#define BEGUN 1
#define TO_COMMIT 2
#define TO_ABORT 3
byte flush, flush_id, aborts = 1;
byte ended; /* set of windows whose end some replica has published */
byte faults = FAULTS, moves = MOVES;
byte lost; /* processes, or their numbers */
bool over, restored;

hidden byte j, k, low, high, every, any, committed, s;

#ifdef BUG_TWO_COORDINATORS
byte also[SLOTS]; /* the epoch that it has left */
#define BOTH(i) (i != OLD && welcomed[i] && also[i] != 0 && ep[OLD] == also[i])
#endif

/* --- A replica --- */

#define SETTLED(i) (welcomed[i] && holds[i] && (generation[i] == target[ep[i]] || phase[i] == COMMITTING) && phase[i] != STEPPING)

inline say(i, what) { vote[AT(ep[i], NUMBER(i))] = vote[AT(ep[i], NUMBER(i))] | (what) }

inline say_settled(i) {
  if
  :: SETTLED(i) -> say(i, SETTLED_BIT)
  :: else
  fi
}

/* The window of this generation is over here. */
inline begin_window(i) {
  ended = ended | (1 << generation[i]);
  generation[i]++;
  dw[i] = 0;
  own_sum[i] = 0;
  mirror_sum[i] = 0;
  phase[i] = OPEN
}

inline publish(i) {
  begin_window(i);
  assert(own[i] == STEPPED(generation[i]));    /* every batch once, and no other */
  assert(mirror[i] == STEPPED(generation[i])); /* the mirror is what it mirrors */
  assert(REPLICAS == 2 || third[i] == STEPPED(generation[i]))
}

inline commit(i) {
  assert(own_sum[i] == WINDOW(generation[i]) && mirror_sum[i] == own_sum[i]);
  begin_window(i)
}

inline take_step(i) {
  assert(phase[i] == SUMMED);
  assert(!(own[i] & own_sum[i]) && !(mirror[i] & mirror_sum[i])); /* never twice */
  own[i] = own[i] | own_sum[i];
  mirror[i] = mirror[i] | mirror_sum[i];
  phase[i] = STEPPING
}

/* What the epoch has decided, of the window that the last one had begun to end. */
inline welcome(i) {
  welcomed[i] = true;
  if
  :: fenced[ep[i]] & (1 << NUMBER(i)) ->
    dw[i] = 0;
    incarnation[i]++ /* the sessions that it has are over */
  :: else
  fi;
  if
  :: holds[i] && verdict[ep[i]] == DROP && phase[i] != OPEN ->
    own_sum[i] = 0;
    mirror_sum[i] = 0;
    phase[i] = SEALED /* until everybody knows */
  :: holds[i] && verdict[ep[i]] == COMMIT && generation[i] < target[ep[i]] -> phase[i] = COMMITTING
  :: holds[i] && verdict[ep[i]] == GO_ON && generation[i] < target[ep[i]] && phase[i] == SUMMED -> take_step(i)
  :: else
  fi;
  say_settled(i)
}

/* From whom it has the slices that it holds, once they are settled; all of its windows are gone. */
#define MAY_REFILL(i) (ep[NEXT(i)] == ep[i] && SETTLED(NEXT(i)) && ep[BEFORE(i)] == ep[i] && SETTLED(BEFORE(i)))
inline refill(i) {
  own[i] = mirror[NEXT(i)];
#ifdef BUG_REFILL_HALF
  mirror[i] = 0;
#else
  mirror[i] = own[BEFORE(i)];
#endif
#if REPLICAS == 3
  third[i] = own[NEXT(i)];
#endif
  generation[i] = target[ep[i]];
  if
  :: phase[NEXT(i)] == SUMMED -> /* a flush holds the window */
    own_sum[i] = mirror_sum[NEXT(i)];
    mirror_sum[i] = own_sum[BEFORE(i)];
    phase[i] = SUMMED
  :: else
  fi;
  holds[i] = true;
  ended = ended | ((1 << generation[i]) >> 1); /* the others know it, if they have not ended it yet */
  say_settled(i)
}

inline seal(i) {
  if
#ifdef BUG_MARKS_UNCHECKED
  :: true -> phase[i] = SEALED; say(i, SEALED_BIT)
#else
  :: dw[i] == mark[AT(ep[i], NUMBER(i))] && (dw[i] == 0 || incarnation[i] == mark_of[AT(ep[i], NUMBER(i))]) -> phase[i] = SEALED; say(i, SEALED_BIT)
#endif
  :: else -> say(i, REFUSED_BIT)
  fi
}

inline sum(i) {
  own_sum[i] = 0;
  for (j : 0 .. PARTS(ep[i], REPLICAS - 1)) {
    assert(!(own_sum[i] & part[AT(ep[i], j)]));
    own_sum[i] = own_sum[i] | part[AT(ep[i], j)]
  };
#ifdef BUG_MIRROR_OF_OTHER
  mirror_sum[i] = dw[i];
#else
  mirror_sum[i] = own_sum[i]; /* the owner sends it on */
#endif
  phase[i] = SUMMED;
  say(i, SUMMED_BIT)
}

/* The weights of the third slice are there. */
#define HAS_STEPPED(i, h) (ep[h] == ep[i] && welcomed[h] && (phase[h] == STEPPING || generation[h] == generation[i] + 1))
#if REPLICAS == 3
#define GATHERED(i) (HAS_STEPPED(i, NEXT(NUMBER(i))) || HAS_STEPPED(i, BEFORE(NUMBER(i))))
inline gather(i) {
  if
  :: HAS_STEPPED(i, NEXT(NUMBER(i))) -> third[i] = own[NEXT(NUMBER(i))]
  :: else -> third[i] = mirror[BEFORE(NUMBER(i))]
  fi
}
#else
#define GATHERED(i) true
inline gather(i) { skip }
#endif

/* Nobody can hear any more what was said in an epoch. */
inline forget(e) {
  any = 0;
  for (k : 0 .. OLD) { any = any | (ep[k] == (e)) };
  if
  :: any -> skip
  :: else ->
#if !defined(BUG_OLD_VOTE) && !defined(BUG_OLD_COMMAND)
    told[e] = 0;
    for (k : 0 .. REPLICAS - 1) {
      vote[AT(e, k)] = 0;
      part[AT(e, k)] = 0;
      mark[AT(e, k)] = 0;
      mark_of[AT(e, k)] = 0
    };
    verdict[e] = 0;
    target[e] = 0;
    fenced[e] = 0;
    broken[e] = false
#endif
  fi
}

inline erase(i) {
  holds[i] = false;
  welcomed[i] = false;
  ready[i] = false;
  phase[i] = OPEN;
  generation[i] = 0;
  dw[i] = 0;
  own_sum[i] = 0;
  mirror_sum[i] = 0;
  own[i] = 0;
  mirror[i] = 0;
  third[i] = 0
}

inline leave(i) {
  s = ep[i];
#ifdef BUG_TWO_COORDINATORS
  also[i] = ep[i];
#endif
  ep[i] = 0;
  welcomed[i] = false;
  ready[i] = false;
  if
  :: i == 0 -> stage[0] = IDLE; of_generation[0] = 0; of_flush[0] = 0
  :: i == OLD -> /* another one has its number: it ends */
    erase(i);
    incarnation[i] = 0;
    stage[1] = IDLE;
    of_generation[1] = 0;
    of_flush[1] = 0
  :: else
  fi;
  forget(s)
}

#define IN(i) (ep[i] != 0 && welcomed[i])

proctype Replica(byte i) {
  do
  :: over -> break
  :: d_step { ep[i] != 0 && !welcomed[i] -> welcome(i) }
  :: d_step { i != OLD && IN(i) && !holds[i] && MAY_REFILL(i) -> refill(i) }
  :: d_step {
      IN(i) && !ready[i] && TOLD(i, READY_BIT) ->
      ready[i] = true;
      if
      :: phase[i] == SEALED -> phase[i] = OPEN
      :: phase[i] == COMMITTING -> commit(i)
      :: else
      fi
    }
  :: d_step { ready[i] && phase[i] == OPEN && TOLD(i, SEAL_BIT) && !SAID(ep[i], NUMBER(i), SEALED_BIT | REFUSED_BIT) -> seal(i) }
  :: d_step {
      ready[i] && TOLD(i, UNSEAL_BIT) && !SAID(ep[i], NUMBER(i), UNSEALED_BIT) ->
      phase[i] = OPEN;
      own_sum[i] = 0;
      mirror_sum[i] = 0;
      say(i, UNSEALED_BIT)
    }
  :: d_step {
      phase[i] == SEALED && ready[i] && TOLD(i, SUM_BIT) && !SAID(ep[i], NUMBER(i), GAVE_BIT) ->
      part[AT(ep[i], NUMBER(i))] = dw[i];
#ifdef BUG_CLEARED_EARLY
      dw[i] = 0;
#endif
      say(i, GAVE_BIT)
    }
  :: d_step { phase[i] == SEALED && ready[i] && ALL_SAID(ep[i], GAVE_BIT) -> sum(i) }
  :: d_step { phase[i] == SUMMED && ready[i] && TOLD(i, STEP_BIT) -> take_step(i) }
#ifdef BUG_STEP_BEFORE_SUMMED
  :: d_step { phase[i] == SEALED && ready[i] && TOLD(i, STEP_BIT) -> phase[i] = SUMMED; take_step(i) }
#endif
  :: d_step {
      IN(i) && phase[i] == STEPPING && GATHERED(i) ->
      gather(i);
      publish(i);
      if
      :: ready[i] -> say(i, ENDED_BIT)
      :: else -> say_settled(i)
      fi
    }
  :: d_step { phase[i] == SUMMED && ready[i] && TOLD(i, TO_COMMIT_BIT) -> phase[i] = COMMITTING; say(i, DECIDED_BIT) }
  :: d_step { phase[i] == SUMMED && ready[i] && TOLD(i, TO_ABORT_BIT) -> phase[i] = ABORTING; say(i, DECIDED_BIT) }
  :: d_step { phase[i] == COMMITTING && ready[i] && TOLD(i, COMMIT_BIT) -> commit(i); say(i, ENDED_BIT) }
  :: d_step { ep[i] != 0 && broken[ep[i]] -> leave(i) }
#ifdef BUG_TWO_COORDINATORS
  :: d_step { BOTH(i) && phase[i] == SEALED && ALL_SAID(also[i], GAVE_BIT) -> s = ep[i]; ep[i] = also[i]; sum(i); ep[i] = s }
  :: d_step { BOTH(i) && phase[i] == SUMMED && (told[also[i]] & STEP_BIT) -> take_step(i) }
#endif
  od
}

/* --- The coordinator --- */

/* What the replicas have kept decides. Whoever has stepped knew that all had the sum; and nobody was told of a step that not all have. */
inline decide(e) {
  low = 255;
  high = 0;
  for (j : 0 .. REPLICAS - 1) {
    if
    :: holds[j] && generation[j] < low -> low = generation[j]
    :: else
    fi;
    if
    :: holds[j] && generation[j] > high -> high = generation[j]
    :: else
    fi
  };
  every = true;
  any = false;
  committed = high > low;
  for (j : 0 .. REPLICAS - 1) {
    if
    :: holds[j] && generation[j] == low && (phase[j] < SUMMED || phase[j] == ABORTING) -> every = false
    :: holds[j] && generation[j] == low && phase[j] >= SUMMED && phase[j] != ABORTING ->
      any = true;
      committed = committed || phase[j] == COMMITTING
    :: else
    fi
  };
  assert(!committed || (high <= low + 1 && every)); /* one generation at most behind, and able to follow */
#ifdef BUG_DROPPED_STEP
  every = every && high > low;
#endif
#ifdef BUG_ANY_SUM
  every = every || any;
#endif
  target[e] = low;
  if
  :: committed ->
    verdict[e] = (IS_FLUSH(low) -> COMMIT : GO_ON);
    target[e] = low + 1
  :: !committed && every && any ->
    verdict[e] = GO_ON;
    target[e] = (IS_FLUSH(low) -> low : low + 1)
  :: else -> verdict[e] = DROP
  fi;
  assert(!((ended >> low) & 1) || target[e] == low + 1) /* what one has published, all will */
}

/* Of a client's session; and whether replica k may have its batch, too. */
#define IS_OPEN(c) (of_incarnation[c] == incarnation[at[c]])
#define HAD(c, k) (left[AT(c, k)] == incarnation[k] + 1 && at[c] != (k) && generation[k] == window && generation[at[c]] == window)
#define KNOWN(c) (sent[c] && IS_OPEN(c) && at[c] < OLD)

/* Sessions that have gone elsewhere must not count where they were. */
inline fence(e) {
  for (j : 0 .. CLIENTS - 1) {
    for (k : 0 .. REPLICAS - 1) {
      if
#ifndef BUG_MOVED_UNFENCED
      :: at[j] < OLD && IS_OPEN(j) && HAD(j, k) ->
        fenced[e] = fenced[e] | (1 << k)
#endif
      :: else
      fi
    }
  };
  assert(!fenced[e] || verdict[e] == DROP)
}

/* No two of them side by side are empty. */
#if REPLICAS == 3
#define ALL_SENT (sent[0] && sent[1] && sent[2])
#define ALL_OPEN (KNOWN(0) && KNOWN(1) && KNOWN(2))
#define ALL_HELD ((holds[0] || holds[1]) && (holds[1] || holds[2]) && (holds[2] || holds[0]))
#else
#define ALL_SENT (sent[0] && sent[1])
#define ALL_OPEN (KNOWN(0) && KNOWN(1))
#define ALL_HELD (holds[0] || holds[1])
#endif

inline begin_epoch() {
  if
  :: !ALL_HELD -> /* back to the checkpoint */
    assert(lost >= 2);
    restored = true;
    over = true
  :: else ->
    epoch++;
    assert(epoch < EPOCHS);
    decide(epoch);
    fence(epoch);
    for (j : 0 .. REPLICAS - 1) { ep[j] = epoch };
    stage[0] = JOINING;
    of_flush[0] = (flush != 0 -> flush_id : NO_FLUSH)
  fi
}

/* The coordinator's slot and its epoch. */
#define SLOT(c) ((c) == 0 -> 0 : OLD)
#define OF(c) ep[SLOT(c)]
#define HERE(c) (OF(c) != 0 && welcomed[SLOT(c)])
inline tell(c, what) { told[OF(c)] = told[OF(c)] | (what) }

/* As it was before the seal: a connection brings things in order. */
inline next_round(c) {
  told[OF(c)] = READY_BIT;
  for (j : 0 .. REPLICAS - 1) {
    vote[AT(OF(c), j)] = SETTLED_BIT;
    part[AT(OF(c), j)] = 0;
    mark[AT(OF(c), j)] = 0;
    mark_of[AT(OF(c), j)] = 0
  };
  of_flush[c] = 0;
  stage[c] = READY
}

proctype Coordinator(byte c) {
  do
  :: over -> break
  :: d_step { c == 0 && stage[0] == IDLE && NOBODY_IN -> begin_epoch() }
  :: d_step {
      stage[c] == JOINING && HERE(c) && ALL_HEARD(OF(c), SETTLED_BIT) ->
      tell(c, READY_BIT);
      of_generation[c] = target[OF(c)];
      if
      :: phase[SLOT(c)] == SUMMED -> /* a flush, which was kept */
        stage[c] = HELD;
        of_flush[c] = (of_flush[c] == NO_FLUSH -> flush_id : of_flush[c]);
        if
        :: flush == 0 -> flush = BEGUN
        :: else
        fi
      :: else ->
        stage[c] = READY;
        if
        :: flush != 0 && window == of_generation[c] && of_flush[c] == flush_id -> /* it is gone, which only its trainer may have wanted */
          assert(flush == TO_ABORT);
          flush = 0;
          flush_id++
        :: else
        fi;
        of_flush[c] = 0
      fi
    }
  :: d_step {
      stage[c] == READY && ready[SLOT(c)] && ALL_SENT && window == generation[SLOT(c)] && phase[SLOT(c)] == OPEN ->
      of_generation[c] = window;
      of_flush[c] = flush_id;
      for (j : 0 .. CLIENTS - 1) {
        s = AT(OF(c), NUMBER(at[j]));
        mark[s] = mark[s] | BIT(j, window);
        mark_of[s] = ((mark_of[s] == 0 || mark_of[s] == of_incarnation[j]) -> of_incarnation[j] : 255)
      };
      for (j : 0 .. REPLICAS - 1) { /* marks that are right match */
        assert(c != 0 || broken[epoch] || !ALL_OPEN || generation[j] != window || dw[j] == mark[AT(epoch, j)])
      };
      tell(c, SEAL_BIT);
      stage[c] = SEALING
    }
  :: d_step { stage[c] == SEALING && ALL_HEARD(OF(c), SEALED_BIT) -> tell(c, SUM_BIT); stage[c] = SUMMING }
  :: d_step {
      stage[c] == SEALING && ALL_HEARD(OF(c), SEALED_BIT | REFUSED_BIT) && !ALL_HEARD(OF(c), SEALED_BIT) ->
      tell(c, UNSEAL_BIT);
      stage[c] = UNSEALING
    }
  :: d_step { stage[c] == SUMMING && !IS_FLUSH(of_generation[c]) && MAY_STEP(OF(c)) -> tell(c, STEP_BIT); stage[c] = ENDING }
  :: d_step {
      stage[c] == SUMMING && IS_FLUSH(of_generation[c]) && ALL_HEARD(OF(c), SUMMED_BIT) ->
      stage[c] = HELD;
      if
      :: flush == 0 && window == of_generation[c] && of_flush[c] == flush_id -> flush = BEGUN
      :: else
      fi
    }
  :: d_step {
      stage[c] == HELD && ready[SLOT(c)] && window == of_generation[c] && of_flush[c] == flush_id && flush >= TO_COMMIT ->
      if
#ifdef BUG_COMMIT_UNDECIDED
      :: flush == TO_COMMIT -> told[OF(c)] = told[OF(c)] | TO_COMMIT_BIT | COMMIT_BIT; stage[c] = ENDING
#else
      :: flush == TO_COMMIT -> tell(c, TO_COMMIT_BIT); stage[c] = DECIDING
#endif
      :: flush == TO_ABORT -> tell(c, TO_ABORT_BIT); stage[c] = DECIDING
      fi
    }
  :: d_step {
      stage[c] == DECIDING && ALL_HEARD(OF(c), DECIDED_BIT) -> /* nobody ends it before all know how */
      if
      :: told[OF(c)] & TO_COMMIT_BIT -> tell(c, COMMIT_BIT); stage[c] = ENDING
      :: else -> tell(c, UNSEAL_BIT); stage[c] = UNSEALING
      fi
    }
  :: d_step {
      stage[c] == ENDING && MAY_ANSWER(OF(c)) ->
      for (j : 0 .. REPLICAS - 1) { assert(ep[j] != OF(c) || generation[j] > of_generation[c]) }; /* whoever is asked now has it */
      answered = of_generation[c] + 1;
      next_round(c)
    }
  :: d_step {
      stage[c] == UNSEALING && ALL_HEARD(OF(c), UNSEALED_BIT) ->
      if
      :: (told[OF(c)] & TO_ABORT_BIT) && window == of_generation[c] && of_flush[c] == flush_id && flush == TO_ABORT ->
        flush = 0;
        flush_id++
      :: else
      fi;
      next_round(c)
    }
#ifdef RETRIES /* whoever was refused may ask again for ever, if no client notices why */
    ;
progress:
    skip
#endif
  od
}

/* --- Trainer and clients --- */

#define SERVES(i) (holds[i] && generation[i] == window && phase[i] == OPEN)
/* Who takes a session that another replica has: nobody who has an epoch with that one, nor a window that is about to end. */
#define APART(i, y) ((y) != (i) && holds[y] && phase[y] == OPEN && ((i) == OLD -> ep[y] != ep[OLD] || ep[y] == 0 : ep[y] == 0 && ep[i] == 0))
#define MAY_MOVE(c, y) (window < STEPS && (y) < REPLICAS && APART(at[c], y) && (at[c] == OLD || moves > 0))
/* Who is asked has an epoch with k. */
#define BELONGS_TO(c, k) (ep[at[c]] != 0 && HAD(c, k))
#if REPLICAS == 3
#define ELSEWHERE(c) (BELONGS_TO(c, 0) || BELONGS_TO(c, 1) || BELONGS_TO(c, 2))
#else
#define ELSEWHERE(c) (BELONGS_TO(c, 0) || BELONGS_TO(c, 1))
#endif

inline send(c) {
  dw[at[c]] = dw[at[c]] | BIT(c, window); /* a repeat, if it is there */
  sent[c] = true
}

inline go_to(c, y) {
  if
  :: of_incarnation[c] != 0 -> left[AT(c, NUMBER(at[c]))] = of_incarnation[c] + 1
  :: else
  fi;
  at[c] = y;
  of_incarnation[c] = incarnation[y];
  sent[c] = false
}

inline move(c, y) {
  if
  :: at[c] < OLD -> moves--
  :: else
  fi;
  go_to(c, y)
}

proctype Client(byte c) {
  do
  :: over -> break
  :: d_step { window < STEPS && of_incarnation[c] == 0 && holds[at[c]] && !ELSEWHERE(c) -> of_incarnation[c] = incarnation[at[c]] }
  :: d_step { of_incarnation[c] == 0 && BELONGS_TO(c, 0) -> go_to(c, 0) } /* it is told so */
  :: d_step { of_incarnation[c] == 0 && BELONGS_TO(c, 1) -> go_to(c, 1) }
  :: d_step { window < STEPS && !sent[c] && IS_OPEN(c) && SERVES(at[c]) -> send(c) }
  :: d_step { window < STEPS && of_incarnation[c] != 0 && !IS_OPEN(c) -> sent[c] = false; of_incarnation[c] = 0 }
  :: d_step { MAY_MOVE(c, 0) -> move(c, 0) }
  :: d_step { MAY_MOVE(c, 1) -> move(c, 1) }
#if REPLICAS == 3
  :: d_step { of_incarnation[c] == 0 && BELONGS_TO(c, 2) -> go_to(c, 2) }
  :: d_step { MAY_MOVE(c, 2) -> move(c, 2) }
#endif
  od
}

#if REPLICAS == 3
#define ONE_HAS(g) ((holds[0] && generation[0] > (g)) || (holds[1] && generation[1] > (g)) || (holds[2] && generation[2] > (g)))
#define HAVE_ALL(i) (holds[i] && generation[i] == STEPS)
#define ALL_HAVE_ALL (HAVE_ALL(0) && HAVE_ALL(1) && HAVE_ALL(2))
#else
#define ONE_HAS(g) ((holds[0] && generation[0] > (g)) || (holds[1] && generation[1] > (g)))
#define HAVE_ALL(i) (holds[i] && generation[i] == STEPS)
#define ALL_HAVE_ALL (HAVE_ALL(0) && HAVE_ALL(1))
#endif

proctype Trainer() {
  do
  :: over -> break
  :: d_step { flush == BEGUN -> flush = TO_COMMIT }
  :: d_step { flush == BEGUN && aborts > 0 -> aborts--; flush = TO_ABORT }
  :: d_step {
      window < STEPS && (answered == window + 1 || ONE_HAS(window)) -> /* it was told, or sees it */
      assert(ended & (1 << window));
      window++;
      for (j : 0 .. CLIENTS - 1) { sent[j] = false };
      for (j : 0 .. CLIENTS * REPLICAS - 1) { left[j] = 0 };
      flush = 0;
      flush_id++;
      answered = 0
    }
  :: d_step {
      !over && window == STEPS && ALL_HAVE_ALL ->
      for (j : 0 .. REPLICAS - 1) {
        assert(own[j] == STEPPED(STEPS) && mirror[j] == own[j]);
        assert(REPLICAS == 2 || third[j] == own[j])
      };
      over = true
    }
  od
}

/* --- Fate --- */

inline lose(i) {
  erase(i);
  incarnation[i]++;
  ep[i] = 0;
  if
  :: i == 0 -> stage[0] = IDLE; of_generation[0] = 0; of_flush[0] = 0
  :: else
  fi;
  lost++
}

inline kill(i) {
  faults--;
  s = ep[i];
  broken[s] = true;
  lose(i);
  forget(s);
  broken[0] = false
}

/* It goes on, and does not know yet that another process has its number. */
inline replace(i) {
  faults--;
  broken[ep[i]] = true;
  broken[0] = false;
  old_number = i;
  holds[OLD] = holds[i];
  incarnation[OLD] = incarnation[i];
  ep[OLD] = ep[i];
  welcomed[OLD] = welcomed[i];
  ready[OLD] = ready[i];
  phase[OLD] = phase[i];
  generation[OLD] = generation[i];
  dw[OLD] = dw[i];
  own_sum[OLD] = own_sum[i];
  mirror_sum[OLD] = mirror_sum[i];
  own[OLD] = own[i];
  mirror[OLD] = mirror[i];
  third[OLD] = third[i];
  if
  :: i == 0 ->
    stage[1] = stage[0];
    of_generation[1] = of_generation[0];
    of_flush[1] = of_flush[0]
  :: else
  fi;
  for (j : 0 .. CLIENTS - 1) {
    if
    :: at[j] == i -> at[j] = OLD
    :: else
    fi
  };
  lose(i)
}

#define MAY_REPLACE (OLDS > 0 && MAY_HIT && old_number == 255)
#define MAY_HIT (faults > 0 && !over)
proctype Fate() {
  do
  :: over -> break
  :: d_step { MAY_HIT -> kill(0) }
  :: d_step { MAY_HIT -> kill(1) }
  :: d_step { MAY_REPLACE && ep[0] != 0 -> replace(0) }
  :: d_step { MAY_REPLACE && ep[1] != 0 -> replace(1) }
#if REPLICAS == 3
  :: d_step { MAY_HIT -> kill(2) }
  :: d_step { MAY_REPLACE && ep[2] != 0 -> replace(2) }
#endif
  :: d_step { MAY_HIT && ep[0] != 0 && ep[0] == epoch && !broken[epoch] -> faults--; broken[epoch] = true }
  od
}

init {
  atomic {
    d_step {
      for (j : 0 .. REPLICAS - 1) {
        holds[j] = true;
        incarnation[j] = 1;
        ep[j] = 1;
        welcomed[j] = true;
        ready[j] = true;
        vote[AT(1, j)] = SETTLED_BIT;
        at[j] = j;
        of_incarnation[j] = 1
      };
      epoch = 1;
      told[1] = READY_BIT;
      stage[0] = READY
    };
    run Replica(0);
    run Replica(1);
    run Replica(2);
#if REPLICAS == 3
    run Replica(3);
#endif
    run Coordinator(0);
    run Coordinator(1);
    run Client(0);
    run Client(1);
#if REPLICAS == 3
    run Client(2);
#endif
    run Trainer();
    run Fate()
  }
}
