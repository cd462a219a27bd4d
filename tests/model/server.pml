/* What the server does: chunks, streams, windows. */

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

/* spare: whether the marks of a repeated step are those that it was taken with, but for what added nothing. */
inline compare_with_step() {
  spare = 1;
  i = 0;
  do
  :: i < LANES ->
    assert(named[i] >= step_marks[i]);
    n = (named[i] == step_marks[i] -> accepted[i] : step_marks[i]) + 1;
    do
    :: n > accepted[i] -> break
    :: n <= accepted[i] && ITEM_AT(i, n) >= BAD -> n++
    :: else ->
#ifndef BUG_STEP_MOVED
      spare = 0;
#endif
      break
    od;
    i++
  :: else -> break
  od;
  skip
}

/* What was named and added nothing is behind the trainer. */
inline pass_over() {
#ifndef BUG_STEP_NOT_PASSED
  i = 0;
  do
  :: i < LANES ->
    if
    :: base[i] < named[i] -> base[i] = named[i]
    :: else
    fi;
    i++
  :: else -> break
  od;
#endif
  skip
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
