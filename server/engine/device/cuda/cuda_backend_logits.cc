// Logits of a head on a CUDA device: through the workspace of its batches, as many rows at a time as that
// takes, on their stream.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/cuda/rows/logit_outputs.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/logit_parts.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {

using kernels::LogitOutputs;
using kernels::SizeOf;
using kernels::cuda::LogitSums;
using kernels::cuda::Result;

namespace {

// `count` elements at `first` of an array of the host's.
template <class T>
Result CopyBack(const T* from, int64_t first, int64_t count, T* to, cudaStream_t stream) {
  LOSSD_CUDA_TRY(cudaMemcpyAsync(to + first, from, static_cast<size_t>(count) * sizeof(T),
                                 cudaMemcpyDeviceToHost, stream));
  return {};
}

}  // namespace

absl::Status CudaBackend::Logits(const LogitRows& rows) {
  return shard_.whole() ? Finished(OwnLogits(rows)) : LogitsOverRanks(rows);
}

absl::Status CudaBackend::LogitsOverRanks(const LogitRows& rows) {
  std::vector<std::byte> hidden_states(
      static_cast<size_t>(rows.rows * config_.hidden_size * SizeOf(config_.weight_type)));
  if (shard_.leads()) std::memcpy(hidden_states.data(), rows.hidden_states, hidden_states.size());
  std::vector<int64_t> from(static_cast<size_t>(shard_.layout.ranks()));
  from[HeadShard::kLeader] = static_cast<int64_t>(hidden_states.size());
  const kernels::collectives::Result spread = [&] {
    const kernels::ExchangeWait wait(shard_.observer, kernels::Exchange::kHiddenStates);
    return shard_.host_communicator->AllGatherV(hidden_states.data(), from, hidden_states.data(), nullptr);
  }();
  if (!spread.ok()) return ToStatus(spread);
  const LogitPart part(rows, shard_.layout, shard_.rank);
  std::vector<std::byte> own(static_cast<size_t>(part.bytes()));
  LogitRows own_rows = rows;
  own_rows.hidden_states = hidden_states.data();
  own_rows.outputs = part.In(own.data());
  const absl::Status computed = Finished(OwnLogits(own_rows));
  return computed.ok() ? GatherLogits(rows, shard_, own) : computed;
}

Result CudaBackend::OwnLogits(const LogitRows& rows) {
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  const int64_t most = step_.PlacesOfLogits(rows.outputs.top_k).most_rows;
  for (int64_t first = 0; result.ok() && first < rows.rows; first += most) {
    // Until everything of these rows is enqueued nobody else may put work between.
    const MutexLock lock(device_->workspace_turn);
    result = EnqueueLogits(rows, first, std::min(most, rows.rows - first));
  }
  return result;
}

int64_t CudaBackend::RowsOfLogits() const {
  // Over ranks they take memory of each rank's host.
  constexpr int64_t kMostBytesOverRanks = int64_t{64} << 20;
  const int64_t row_bytes = shard_.layout.vocab() * static_cast<int64_t>(sizeof(float));
  const int64_t most_over_ranks = std::max<int64_t>(kMostBytesOverRanks / row_bytes, 1);
  const int64_t most =
      std::min(step_.PlacesOfLogits(0).most_rows, step_.PlacesOfLogits(kernels::kMostTopK).most_rows);
  return shard_.whole() ? most : std::min(most, most_over_ranks);
}

Result CudaBackend::EnqueueLogits(const LogitRows& wanted, int64_t first, int64_t rows) const {
  const LogitOutputs& out = wanted.outputs;
  cudaStream_t stream = device_->pipeline.computing();
  const auto places = step_.PlacesOfLogits(out.top_k);
  const int64_t row_bytes = config_.hidden_size * SizeOf(config_.weight_type);
  auto* x = static_cast<char*>(places.x);
  LOSSD_CUDA_TRY(cudaMemcpy2DAsync(x, static_cast<size_t>(WeightRowBytes()),
                                   static_cast<const char*>(wanted.hidden_states) + first * row_bytes,
                                   static_cast<size_t>(row_bytes), static_cast<size_t>(row_bytes),
                                   static_cast<size_t>(rows), cudaMemcpyHostToDevice, stream));
  if (const int64_t padding = WeightRowBytes() - row_bytes; padding > 0) {
    LOSSD_CUDA_TRY(cudaMemset2DAsync(x + row_bytes, static_cast<size_t>(WeightRowBytes()), 0,
                                     static_cast<size_t>(padding), static_cast<size_t>(rows), stream));
  }
  LOSSD_CUDA_PASS_ON(step_.MultiplyLogits(rows, weights_.data(), stream));
  LogitSums sums;
  sums.rows = rows;
  sums.vocab = config_.vocab_size;
  sums.sums = places.sums;
  sums.stride = places.stride;
  if (wanted.bias == Bias::kUse && config_.bias) sums.bias = Floats(bias_);
  sums.options.logit_scale = wanted.logit_scale;
  sums.options.softcap = wanted.softcap;
  if (out.top_k == 0) {
    LOSSD_CUDA_PASS_ON(kernels::cuda::FinishLogits(sums, out.type, stream));
    const int64_t logits_bytes = config_.vocab_size * SizeOf(out.type);
    LOSSD_CUDA_TRY(cudaMemcpy2DAsync(
        static_cast<char*>(out.logits) + first * logits_bytes, static_cast<size_t>(logits_bytes), places.sums,
        static_cast<size_t>(places.stride) * sizeof(float), static_cast<size_t>(logits_bytes),
        static_cast<size_t>(rows), cudaMemcpyDeviceToHost, stream));
    return {};
  }
  const kernels::cuda::TopLogits top{out.top_k, places.top_tokens, places.top_logits, places.log_sum_exp};
  LOSSD_CUDA_PASS_ON(kernels::cuda::FindTopLogits(sums, top, stream));
  LOSSD_CUDA_PASS_ON(CopyBack(top.tokens, first * out.top_k, rows * out.top_k, out.top_tokens, stream));
  LOSSD_CUDA_PASS_ON(CopyBack(top.logits, first * out.top_k, rows * out.top_k, out.top_logits, stream));
  return CopyBack(top.log_sum_exp, first, rows, out.log_sum_exp, stream);
}

}  // namespace lossd::engine
