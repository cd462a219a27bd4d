#include "server/engine/device/gradient_summary.h"

#include <xxhash.h>

#include <array>
#include <cmath>

#include "kernels/data_type.h"

namespace lossd::engine {

struct GradientChecksum::Hash {
  struct Free {
    void operator()(XXH3_state_t* pointer) const { XXH3_freeState(pointer); }
  };
  std::unique_ptr<XXH3_state_t, Free> state{XXH3_createState()};
};

GradientChecksum::GradientChecksum() : hash_(std::make_unique<Hash>()) {
  XXH3_64bits_reset(hash_->state.get());
}

GradientChecksum::~GradientChecksum() = default;

void GradientChecksum::Add(std::span<const float> piece) {
  XXH3_64bits_update(hash_->state.get(), piece.data(), piece.size_bytes());
}

uint64_t GradientChecksum::Value() const { return XXH3_64bits_digest(hash_->state.get()); }

void GradientSummarizer::Add(std::span<const float> piece) {
  checksum_.Add(piece);
  non_finite_ +=
      kernels::CountNonFinite(kernels::DataType::kFloat32, piece.data(), static_cast<int64_t>(piece.size()));
  // Several partial sums, so that the additions need not wait for each other.
  std::array<double, 8> sums{};
  size_t i = 0;
  for (; i + sums.size() <= piece.size(); i += sums.size()) {
    for (size_t k = 0; k < sums.size(); ++k) {
      const double value = piece[i + k];
      sums[k] += value * value;
    }
  }
  for (; i < piece.size(); ++i) sums[0] += static_cast<double>(piece[i]) * piece[i];
  for (const double sum : sums) squares_ += sum;
}

GradientSummary GradientSummarizer::Finish() const {
  return {std::sqrt(squares_), checksum_.Value(), non_finite_};
}

}  // namespace lossd::engine
