/* Exactly-once accumulation, flush, step, drain and restore: what the engine does (server/engine: head/accumulation_ledger,
 * head/session_table, head/head_chunks, head/gradient_window, head/head_window, head/head_checkpoint) and how a trainer with several lanes uses it (client/src: lane_run,
 * session_link, flush, step). run_model.py has spin verify it, and refute it once a BUG_ switch breaks it.
 *
 * A lane is one stream of numbered chunks, of a session of its own. A chunk carries one item, a piece of the trainer's batch;
 * a lane has CHUNKS items in each of STEPS steps. Once all items of a step are answered the trainer ends the window, by a
 * flush that is committed or by ApplyStep; it may also do so early. While the answer of a step is missing it may have losses
 * computed, which moves its marks, and call again. What goes wrong, FAULTS times, may do so at any moment.
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
#define LOOK 32 /* instead of an item: a chunk of losses alone */

#include "state.pml"
#include "server.pml"
#include "lane.pml"
#include "trainer.pml"
#include "operator.pml"

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
