// What the replicas of a head on the CPU do together when a window ends.
#include <algorithm>

#include "kernels/collectives/slice_exchange.h"
#include "kernels/optimizer.h"
#include "kernels/rounding.h"
#include "server/engine/device/cpu/cpu_head.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/device/slice_checks.h"
#include "server/engine/device/slice_tallies.h"

namespace lossd::engine {

using kernels::OptimizerCoefficients;
using kernels::SizeOf;
using kernels::SliceLayout;
using kernels::collectives::Result;
using kernels::collectives::SliceExchange;

namespace {

// What of a slice goes between replicas at once: as much is kept of every other one's.
constexpr int64_t kMostPieceBytes = int64_t{16} << 20;

// The same at every replica.
int32_t PiecesOf(const SliceLayout& layout, int64_t row_bytes) {
  const int64_t rows = kernels::CeilDivide(layout.rows(), layout.replicas());
  return static_cast<int32_t>(std::max<int64_t>(1, kernels::CeilDivide(rows * row_bytes, kMostPieceBytes)));
}

// Calls exchange(piece, pieces) for one piece after the other.
template <class Exchange>
absl::Status InPieces(int32_t pieces, Exchange exchange) {
  for (int32_t piece = 0; piece < pieces; ++piece) {
    const absl::Status done = ToStatus(exchange(piece, pieces));
    if (!done.ok()) return done;
  }
  return absl::OkStatus();
}

}  // namespace

int64_t CpuBackend::ScratchBytes(const HeadConfig& config, const HeadShard& shard) {
  if (config.gradient_bytes() == 0) return 0;
  const SliceLayout layout = shard.slices();
  const auto bytes = [&](int64_t columns) {
    return SliceExchange::ScratchBytes(layout, shard.replica, columns, PiecesOf(layout, columns * kFloat));
  };
  return config.bias ? std::max(bytes(config.hidden_size), bytes(1)) : bytes(config.hidden_size);
}

int64_t CpuBackend::SumBytes(const HeadConfig& config, const HeadShard& shard) {
  const HeadConfig stepped = WithRows(config, shard.stepped().count);
  return stepped.gradient_bytes() + stepped.bias_gradient_bytes() + ScratchBytes(config, shard);
}

absl::Status CpuBackend::CheckSummed() const {
  // Who steps nothing is not given anything either.
  return sum_.empty && stepped_.count > 0 ? NotSummed() : absl::OkStatus();
}

absl::Status CpuBackend::SumSlices(Gradient* of, const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  CpuGradient& gradient = Find(of);
  Settle(gradient);
  sum_.empty = true;  // until all of it is there: nothing is to be stepped by parts of two windows
  const SliceLayout layout = shard_.slices();
  const auto sum = [&](HostBuffer& values, int64_t columns, HostBuffer& sums) {
    SliceExchange exchange(layout, columns, replicas.device);
    return InPieces(PiecesOf(layout, columns * kFloat), [&](int32_t piece, int32_t pieces) {
      return exchange.Sum(Floats(values), piece, pieces, Floats(sums), sum_scratch_.data(), nullptr);
    });
  };
  absl::Status summed = sum(gradient.dw, config_.hidden_size, sum_.dw);
  if (summed.ok() && config_.bias) summed = sum(gradient.db, 1, sum_.db);
  sum_.empty = !summed.ok();
  return summed;
}

absl::Status CpuBackend::AddToSum(Gradient* of, int32_t replica, const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  CpuGradient* const own = replica == shard_.replica ? &Find(of) : nullptr;
  if (own != nullptr) Settle(*own);
  sum_.empty = true;
  const SliceLayout layout = shard_.slices();
  const auto add = [&](const float* values, int64_t columns, HostBuffer& sums) {
    SliceExchange exchange(layout, columns, replicas.device);
    return InPieces(PiecesOf(layout, columns * kFloat), [&](int32_t piece, int32_t pieces) {
      Result sent = exchange.Send(values, replica, piece, pieces, sum_scratch_.data(), nullptr);
      if (!sent.ok()) return sent;
      const auto [rows, before] = exchange.OwnPiece(piece, pieces);
      const float* const from = values == nullptr ? Floats(sum_scratch_) : values + rows.first * columns;
      kernels::CpuAddGradient(from, rows.count * columns, kernels::WeightGradient::kAccumulate,
                              Floats(sums) + before * columns);
      return sent;
    });
  };
  absl::Status added = add(own == nullptr ? nullptr : Floats(own->dw), config_.hidden_size, sum_.dw);
  if (added.ok() && config_.bias) added = add(own == nullptr ? nullptr : Floats(own->db), 1, sum_.db);
  sum_.empty = !added.ok();
  return added;
}

void CpuBackend::Settle(CpuGradient& gradient) const {
  if (!gradient.empty) return;
  std::fill_n(Floats(gradient.dw), config_.elements(), 0.0f);
  if (config_.bias) std::fill_n(Floats(gradient.db), config_.vocab_size, 0.0f);
}

absl::StatusOr<GradientTallies> CpuBackend::TallySum(double scale, const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  return MergeTallies(Tally(sum_, stepped_, static_cast<float>(scale)), replicas.host);
}

absl::Status CpuBackend::StepSlices(const StepArguments& arguments) {
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  const absl::StatusOr<OptimizerCoefficients> coefficients = CoefficientsFor(config_, arguments);
  if (!coefficients.ok()) return coefficients.status();
  if (stepped_.count == 0) return absl::OkStatus();
  kernels::CpuApplyOptimizer(MatrixOf(Floats(sum_.dw), stepped_), *coefficients);
  if (config_.bias) kernels::CpuApplyOptimizer(BiasOf(Floats(sum_.db), stepped_), *coefficients);
  return absl::OkStatus();
}

absl::Status CpuBackend::GatherSlices(const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  const SliceLayout layout = shard_.slices();
  const auto gather = [&](HostBuffer& values, int64_t columns, int64_t entry_bytes) {
    SliceExchange exchange(layout, columns, replicas.device);
    return InPieces(PiecesOf(layout, columns * entry_bytes), [&](int32_t piece, int32_t pieces) {
      return exchange.Gather(values.data(), entry_bytes, piece, pieces, nullptr);
    });
  };
  absl::Status gathered = gather(weights_, config_.hidden_size, SizeOf(config_.weight_type));
  if (gathered.ok() && config_.bias) gathered = gather(bias_, 1, kFloat);
  return gathered;
}

absl::Status CpuBackend::ReadSum(int64_t first_row, int64_t rows, float* out) {
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  return ReadStepped(sum_.dw, config_.hidden_size * kFloat, {first_row, rows}, out);
}

absl::Status CpuBackend::ReadBiasSum(int64_t first_row, int64_t rows, float* out) {
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  return ReadStepped(sum_.db, kFloat, {first_row, rows}, out);
}

}  // namespace lossd::engine
