// Norm, checksum and health of a gradient, taken piece by piece in row order.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_GRADIENT_SUMMARY_H_
#define LOSSD_SERVER_ENGINE_DEVICE_GRADIENT_SUMMARY_H_

#include <cstdint>
#include <memory>
#include <span>

namespace lossd::engine {

struct GradientSummary {
  double norm = 0;         // Frobenius; NaN or infinite if an element is
  uint64_t checksum = 0;   // XXH3, 64 bit, seed 0, of the little-endian fp32 bytes
  int64_t non_finite = 0;  // elements that are NaN or infinite
};

// The checksum alone.
class GradientChecksum {
 public:
  GradientChecksum();
  ~GradientChecksum();

  void Add(std::span<const float> piece);
  uint64_t Value() const;

 private:
  struct Hash;
  std::unique_ptr<Hash> hash_;
};

class GradientSummarizer {
 public:
  void Add(std::span<const float> piece);
  GradientSummary Finish() const;

 private:
  GradientChecksum checksum_;
  double squares_ = 0;
  int64_t non_finite_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_GRADIENT_SUMMARY_H_
