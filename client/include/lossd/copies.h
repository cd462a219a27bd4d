// Copies of heads that a server makes by itself, and moving averages of weights: what Client::CopyHead and
// Head::Blend take. Part of lossd/client.h.
//
//   auto average = client->CopyHead("lm_head", "lm_head.ema", {.frozen = true, .master_weights = true});
//   ...
//   head.ApplyStep(...);
//   average->head.Blend("lm_head", {.decay = 0.999});   // after each step
#ifndef LOSSD_COPIES_H_
#define LOSSD_COPIES_H_

#include <cstdint>
#include <string>

namespace lossd {

struct CopyOptions {
  // The copy has the weights alone: no gradient, no optimizer and, unless it is asked for, no master. False:
  // it is configured as the source, and trains on as that would, with its optimizer's moments and steps. Its
  // window is empty in any case.
  bool frozen = false;
  // The copy has an fp32 master of its 16-bit weights anyway. Averages want one: without it, parts of a
  // source that are smaller than the weights' last bits are lost. Nothing where weights are fp32.
  bool master_weights = false;
  uint64_t source_version = 0;  // what the weights must be of, or FAILED_PRECONDITION; 0: any
};

struct BlendOptions {
  // In [0, 1]: what is kept of the weights, of which 1 - decay are replaced by the source's.
  double decay = 0;
  uint64_t source_version = 0;  // as above
  // Likewise the target's. It makes sure that nobody else has written them since, and that a call whose
  // answer was lost is not made twice, whoever makes it again.
  uint64_t target_version = 0;
};

}  // namespace lossd

#endif  // LOSSD_COPIES_H_
