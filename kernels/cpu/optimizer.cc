#include "kernels/optimizer.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/optimizer_rule.h"
#include "kernels/rounding.h"

namespace lossd::kernels {
namespace {

// Elements that a thread takes at once. Each piece has a sum of its own; these are added in order.
constexpr int64_t kPiece = int64_t{1} << 16;
// Elements whose gradient, weights and moments fit into the first-level cache together.
constexpr int64_t kBlock = 1024;
constexpr float kZeros[kBlock] = {};

// Sums in lanes, so that the additions need not wait for each other.
class Tally {
 public:
  void Add(const float* values, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int64_t k = 0; k < kLanes; ++k) {
        const double value = values[i + k];
        squares_[k] += value * value;
      }
    }
    for (; i < count; ++i) squares_[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    // Bits of magnitudes order like the magnitudes.
    int32_t non_finite = 0;
    for (int64_t k = 0; k < count; ++k) {
      const int32_t magnitude = std::bit_cast<int32_t>(values[k]) & 0x7FFFFFFF;
      const bool finite = magnitude < kInfinity;
      non_finite += finite ? 0 : 1;
      largest_ = std::max(largest_, finite ? magnitude : 0);
    }
    non_finite_ += non_finite;
  }

  void AddTo(GradientTally* total) const {
    for (const double sum : squares_) total->squares += sum;
    total->largest = std::max(total->largest, std::bit_cast<float>(largest_));
    total->non_finite += non_finite_;
  }

 private:
  static constexpr int64_t kLanes = 8;
  static constexpr int32_t kInfinity = 0x7F800000;
  double squares_[kLanes] = {};
  int32_t largest_ = 0;
  int64_t non_finite_ = 0;
};

// Calls work(first, count, tally) for every piece; the sum of the tallies.
template <typename Work>
GradientTally TallyPieces(int64_t count, const Work& work) {
  const int64_t pieces = CeilDivide(count, kPiece);
  std::vector<Tally> tallies(static_cast<size_t>(pieces));
  const int64_t threads = std::min(cpu::AvailableThreads(), std::max<int64_t>(pieces, 1));
  cpu::ParallelFor(threads, pieces, [&](int64_t piece, int64_t /*thread*/) {
    const int64_t first = piece * kPiece;
    work(first, std::min(kPiece, count - first), tallies[static_cast<size_t>(piece)]);
  });
  GradientTally total;
  for (const Tally& tally : tallies) tally.AddTo(&total);
  return total;
}

void Scale(const float* __restrict from, int64_t count, float scale, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = scale * from[i];
}

template <int kMoments>
void UpdateBlock(const OptimizerCoefficients c, const float* __restrict gradient, int64_t count,
                 float* __restrict weight, float* __restrict first, float* __restrict second) {
  for (int64_t i = 0; i < count; ++i) {
    float unused = 0;
    float& m = kMoments > 0 ? first[i] : unused;
    float& v = kMoments > 1 ? second[i] : unused;
    weight[i] = UpdatedWeight<kMoments>(c, gradient[i], weight[i], m, v);
  }
}

void Update(const OptimizerCoefficients& c, const float* gradient, int64_t count, float* weight, float* first,
            float* second) {
  if (c.moments == 0) {
    UpdateBlock<0>(c, gradient, count, weight, first, second);
  } else if (c.moments == 1) {
    UpdateBlock<1>(c, gradient, count, weight, first, second);
  } else {
    UpdateBlock<2>(c, gradient, count, weight, first, second);
  }
}

float* At(float* values, int64_t first) { return values == nullptr ? nullptr : values + first; }

// What the step works on is the master, fp32 weights themselves, or 16-bit weights, widened for the time
// being.
void ApplyBlock(const OptimizerTensor& t, const OptimizerCoefficients& c, int64_t first, int64_t count,
                Tally& tally) {
  float gradient[kBlock];
  float widened[kBlock];
  Scale(t.gradient == nullptr ? kZeros : t.gradient + first, count, c.scale, gradient);
  tally.Add(gradient, count);
  char* weight = static_cast<char*>(t.weight) + first * SizeOf(t.weight_type);
  float* worked_on = At(t.master, first);
  if (t.master == nullptr) {
    const bool wide = t.weight_type == DataType::kFloat32;
    worked_on = wide ? reinterpret_cast<float*>(weight) : widened;
    if (!wide) Convert(t.weight_type, weight, DataType::kFloat32, widened, count);
  }
  Update(c, gradient, count, worked_on, At(t.first_moment, first), At(t.second_moment, first));
  if (t.weight_type != DataType::kFloat32) {
    Convert(DataType::kFloat32, worked_on, t.weight_type, weight, count);
  }
}

}  // namespace

GradientTally CpuApplyOptimizer(const OptimizerTensor& tensor, const OptimizerCoefficients& coefficients) {
  return TallyPieces(tensor.count, [&](int64_t first, int64_t count, Tally& tally) {
    for (int64_t i = 0; i < count; i += kBlock) {
      ApplyBlock(tensor, coefficients, first + i, std::min(kBlock, count - i), tally);
    }
  });
}

GradientTally CpuTallyGradient(const float* gradient, int64_t count, float scale) {
  return TallyPieces(count, [&](int64_t first, int64_t piece, Tally& tally) {
    float scaled[kBlock];
    for (int64_t i = 0; i < piece; i += kBlock) {
      const int64_t block = std::min(kBlock, piece - i);
      Scale(gradient + first + i, block, scale, scaled);
      tally.Add(scaled, block);
    }
  });
}

void CpuAddGradient(const float* from, int64_t count, WeightGradient store, float* to) {
  const int64_t pieces = CeilDivide(count, kPiece);
  const int64_t threads = std::min(cpu::AvailableThreads(), std::max<int64_t>(pieces, 1));
  cpu::ParallelFor(threads, pieces, [&](int64_t piece, int64_t /*thread*/) {
    const int64_t first = piece * kPiece;
    const int64_t end = std::min(first + kPiece, count);
    if (store == WeightGradient::kOverwrite) {
      for (int64_t i = first; i < end; ++i) to[i] = 0.0f + from[i];
    } else {
      for (int64_t i = first; i < end; ++i) to[i] = to[i] + from[i];
    }
  });
}

}  // namespace lossd::kernels
