/* What the server, the network and the trainer are at one moment. */

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
#define NAMED_AS_SENT(lane) (named[lane] == logged[lane])
#define LOOKED(lane) \
  (NAMED_AS_SENT(lane) || (ITEM_AT(lane, logged[lane]) == LOOK && ITEM_AT(lane, named[lane] + 1) == LOOK))
/* ENDING by a step whose answer was lost. */
#define LOOKING (trainer == ENDING && stepping && !waiting && my_incarnation == incarnation)
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
