// Which tokens of a batch travel: an ignored one has loss 0, dX 0 and no part in dW, wherever it is computed,
// and so has one that every factor of is 0.
#ifndef LOSSD_CLIENT_SRC_BATCH_SENT_TOKENS_H_
#define LOSSD_CLIENT_SRC_BATCH_SENT_TOKENS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "lossd/client.h"

namespace lossd::internal {

// The tokens of which something may be computed that is not known beforehand.
class NeededTokens {
 public:
  // All of them outlive it.
  NeededTokens(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs);

  size_t size() const { return batch_.labels.size(); }
  bool Has(size_t token) const {
    return batch_.labels[token] != batch_.ignore_index && !(may_be_idle_ && IsIdle(token));
  }

 private:
  bool IsIdle(size_t token) const;

  const Batch& batch_;
  bool may_be_idle_ = false;  // a token whose factors are 0 is of no use
};

// The tokens that are sent, numbered from 0, as runs of neighbours in the batch.
class SentTokens {
 public:
  static SentTokens All(int64_t tokens);
  static SentTokens Of(const NeededTokens& needed);

  int64_t count() const { return count_; }
  // The place of sent token `sent`, below count(), in the batch.
  int64_t PlaceOf(int64_t sent) const;

  struct Run {
    int64_t first = 0;  // place in the batch
    int64_t tokens = 0;
  };
  // Sent tokens [first, first + tokens), which must be within count(), in order.
  std::vector<Run> Runs(int64_t first, int64_t tokens) const;

 private:
  struct Begin {
    int64_t sent = 0;   // number of the run's first token
    int64_t place = 0;  // of that token in the batch
  };
  size_t IndexOf(int64_t sent) const;

  std::vector<Begin> begins_;
  int64_t count_ = 0;
};

// Copies the values of the tokens of some runs, one behind the other. Empty if `values` is.
template <typename T>
std::vector<T> Gather(std::span<const T> values, std::span<const SentTokens::Run> runs) {
  std::vector<T> gathered;
  if (values.empty()) return gathered;
  for (const SentTokens::Run& run : runs) {
    const auto part = values.subspan(static_cast<size_t>(run.first), static_cast<size_t>(run.tokens));
    gathered.insert(gathered.end(), part.begin(), part.end());
  }
  return gathered;
}

// Writes the outputs of tokens that are not needed: losses and dX are 0, returns as TokenReturns says. The
// outputs fit the batch; those of other tokens are left alone.
void FillUnneeded(const NeededTokens& needed, const HeadConfig& head, const BatchOutputs& outputs);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_SENT_TOKENS_H_
