// Random numbers that are the same on every platform and that any thread can draw from any point of the
// sequence: a hash of (stream, index).
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_RANDOM_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_RANDOM_H_

#include <cmath>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

namespace lossd::train_lm {

// The finalizer of SplitMix64.
inline uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

class Random {
 public:
  // Different (seed, purpose, part) give unrelated sequences.
  Random(uint64_t seed, uint64_t purpose, uint64_t part = 0) : key_(Mix(Mix(Mix(seed) ^ purpose) ^ part)) {}

  uint64_t Bits() { return Mix(key_ + next_++); }
  // In (0, 1].
  double Uniform() { return (static_cast<double>(Bits() >> 11U) + 1) * 0x1.0p-53; }
  // In [0, n), n >= 1.
  uint64_t Below(uint64_t n) { return Bits() % n; }
  double Normal() { return std::sqrt(-2 * std::log(Uniform())) * std::cos(2 * std::numbers::pi * Uniform()); }

 private:
  uint64_t key_;
  uint64_t next_ = 0;
};

template <typename T>
void Shuffle(std::vector<T>* items, Random* random) {
  for (size_t i = items->size(); i > 1; --i) std::swap((*items)[i - 1], (*items)[random->Below(i)]);
}

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_RANDOM_H_
