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
