#include "server/engine/device/logit_parts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/collectives/communicator.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {
namespace {

using kernels::LogitOutputs;

struct Part {
  LogitOutputs outputs;
  int64_t first = 0;  // entry
  int64_t entries = 0;
};

// log(e^a + e^b)
float AddLogs(float a, float b) {
  const float most = std::max(a, b);
  if (std::isinf(most)) return most;
  return most + std::log1p(std::exp(std::min(a, b) - most));
}

void PutTogether(const LogitRows& wanted, int64_t vocab, const std::vector<Part>& parts) {
  const int64_t element = kernels::SizeOf(wanted.outputs.type);
  for (const Part& part : parts) {
    const int64_t part_bytes = part.entries * element;
    auto* to = static_cast<char*>(wanted.outputs.logits) + part.first * element;
    const auto* from = static_cast<const char*>(part.outputs.logits);
    for (int64_t row = 0; row < wanted.rows; ++row) {
      std::memcpy(to + row * vocab * element, from + row * part_bytes, static_cast<size_t>(part_bytes));
    }
  }
}

// The largest of a row, from the largest of its parts.
void MergeLargest(const LogitRows& wanted, int64_t row, const std::vector<Part>& parts) {
  const LogitOutputs& out = wanted.outputs;
  int32_t* tokens = out.top_tokens + row * out.top_k;
  float* logits = out.top_logits + row * out.top_k;
  std::vector<int64_t> taken(parts.size());
  for (int32_t place = 0; place < out.top_k; ++place) {
    size_t best = parts.size();
    float most = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const LogitOutputs& part = parts[i].outputs;
      if (taken[i] == part.top_k) continue;
      const float logit = part.top_logits[row * part.top_k + taken[i]];
      // Tokens of a later part are higher: among equals they come behind.
      if (best < parts.size() && logit <= most) continue;
      best = i;
      most = logit;
    }
    const LogitOutputs& part = parts[best].outputs;
    const int64_t at = row * part.top_k + taken[best]++;
    tokens[place] = static_cast<int32_t>(parts[best].first) + part.top_tokens[at];
    logits[place] = most;
  }
}

void MergeRow(const LogitRows& wanted, int64_t row, const std::vector<Part>& parts) {
  const LogitOutputs& out = wanted.outputs;
  float log_sum_exp = -std::numeric_limits<float>::infinity();
  for (const Part& part : parts) {
    const float own = part.outputs.log_sum_exp[row];
    log_sum_exp = std::isnan(own) || std::isnan(log_sum_exp) ? std::numeric_limits<float>::quiet_NaN()
                                                             : AddLogs(log_sum_exp, own);
  }
  out.log_sum_exp[row] = log_sum_exp;
  if (!std::isnan(log_sum_exp)) {
    MergeLargest(wanted, row, parts);
    return;
  }
  std::fill_n(out.top_tokens + row * out.top_k, out.top_k, -1);
  std::fill_n(out.top_logits + row * out.top_k, out.top_k, log_sum_exp);
}

}  // namespace

LogitPart::LogitPart(const LogitRows& wanted, const kernels::ShardLayout& layout, int32_t rank)
    : wanted_(wanted.outputs), rows_(wanted.rows), entries_(layout.rows(rank)) {
  const int64_t k = std::min<int64_t>(wanted_.top_k, entries_);
  const auto floats = static_cast<int64_t>(sizeof(float));
  bytes_ =
      wanted_.top_k == 0 ? rows_ * entries_ * kernels::SizeOf(wanted_.type) : rows_ * (2 * k + 1) * floats;
}

LogitOutputs LogitPart::In(std::byte* memory) const {
  LogitOutputs part{.type = wanted_.type};
  if (wanted_.top_k == 0) {
    part.logits = memory;
    return part;
  }
  part.top_k = static_cast<int32_t>(std::min<int64_t>(wanted_.top_k, entries_));
  part.top_tokens = reinterpret_cast<int32_t*>(memory);
  part.top_logits = reinterpret_cast<float*>(memory) + rows_ * part.top_k;
  part.log_sum_exp = part.top_logits + rows_ * part.top_k;
  return part;
}

void MergeLogits(const LogitRows& wanted, const kernels::ShardLayout& layout, std::byte* parts) {
  std::vector<Part> outputs;
  for (int32_t rank = 0; rank < layout.ranks(); ++rank) {
    const LogitPart part(wanted, layout, rank);
    outputs.push_back({part.In(parts), layout.first(rank), part.entries()});
    parts += part.bytes();
  }
  if (wanted.outputs.top_k == 0) {
    PutTogether(wanted, layout.vocab(), outputs);
    return;
  }
  for (int64_t row = 0; row < wanted.rows; ++row) MergeRow(wanted, row, outputs);
}

absl::Status GatherLogits(const LogitRows& wanted, const HeadShard& shard,
                          const std::vector<std::byte>& own) {
  const auto ranks = static_cast<size_t>(shard.layout.ranks());
  std::vector<int64_t> sent(ranks);
  std::vector<int64_t> received(ranks);
  sent[HeadShard::kLeader] = static_cast<int64_t>(own.size());
  for (size_t rank = 0; shard.leads() && rank < ranks; ++rank) {
    received[rank] = LogitPart(wanted, shard.layout, static_cast<int32_t>(rank)).bytes();
  }
  std::vector<std::byte> all(static_cast<size_t>(std::reduce(received.begin(), received.end())));
  const kernels::ExchangeWait wait(shard.observer, kernels::Exchange::kRows);
  const kernels::collectives::Result gathered =
      shard.host_communicator->AllToAllV(own.data(), sent, all.data(), received, nullptr);
  if (!gathered.ok()) return ToStatus(gathered);
  if (shard.leads()) MergeLogits(wanted, shard.layout, all.data());
  return absl::OkStatus();
}

}  // namespace lossd::engine
