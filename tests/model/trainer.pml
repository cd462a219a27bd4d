/* The trainer: its knowledge, its calls, and what the server does about them. */

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
    :: n <= logged[i] && n <= accepted[i] && ITEM_AT(i, n) == LOOK -> n++
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
  /* The call is about to name what the lanes have come to since: losses alone, or by mistake more. */
  :: d_step {
      LOOKING && EVERY(ALL_SEEN) && !EVERY(NAMED_AS_SENT) && (EVERY(LOOKED) || faults > 0) ->
      if
      :: EVERY(LOOKED)
      :: else -> spend()
      fi;
      i = 0;
      do
      :: i < LANES -> named[i] = logged[i]; i++
      :: else -> break
      od;
      skip
    }
  /* ApplyStep. */
  :: d_step {
      trainer == ENDING && stepping && !waiting && my_incarnation == incarnation ->
      if
#ifndef BUG_STEP_FORGOTTEN
      :: named_generation == step_taken ->
        compare_with_step();
        if
        :: spare ->
          pass_over();
          note_consumed()
        :: else -> /* refused: that would be another step */
          i = 0;
          do
          :: i < LANES -> named[i] = step_marks[i]; i++
          :: else -> break
          od;
          skip
        fi
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
