// What the cases of all communicators have in common.
#ifndef LOSSD_TESTS_UNIT_COLLECTIVES_CASES_H_
#define LOSSD_TESTS_UNIT_COLLECTIVES_CASES_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/unit/collectives/backend.h"
#include "tests/unit/collectives/ranks.h"

namespace lossd::kernels::collectives::testing {

// Longer than anything takes that does not hang.
inline constexpr std::chrono::seconds kLong(100);

// Memory with values in it.
template <class Value>
class Array {
 public:
  explicit Array(size_t count) : Array(std::vector<Value>(count)) {}
  explicit Array(const std::vector<Value>& values)
      : count_(values.size()), memory_(BackendUnderTest().Allocate(bytes())) {
    if (count_ > 0) memory_->Set(values.data(), bytes());
  }
  Value* data() { return count_ == 0 ? nullptr : static_cast<Value*>(memory_->data()); }
  void Set(const std::vector<Value>& values) {
    if (count_ > 0) memory_->Set(values.data(), bytes());
  }
  std::vector<Value> values() {
    std::vector<Value> values(count_);
    if (count_ > 0) memory_->Get(values.data(), bytes());
    return values;
  }

 private:
  int64_t bytes() const { return static_cast<int64_t>(count_ * sizeof(Value)); }

  size_t count_;
  std::unique_ptr<Memory> memory_;
};

inline std::unique_ptr<Communicator> Connected(Rank& rank, std::chrono::milliseconds timeout = kLong) {
  std::unique_ptr<Communicator> communicator;
  const Result result = BackendUnderTest().Connect(rank, timeout, &communicator);
  EXPECT_TRUE(result.ok()) << result.message();
  return communicator;
}

inline void ExpectOk(const Result& result) { EXPECT_TRUE(result.ok()) << result.message(); }

inline void* Stream() { return BackendUnderTest().Stream(); }

// Numbers of many sizes and both signs, whose sum depends on the order.
inline std::vector<float> Parts(int rank, int64_t count) {
  std::vector<float> parts(static_cast<size_t>(count));
  uint32_t state = 12345u + 977u * static_cast<uint32_t>(rank);
  for (float& part : parts) {
    state = state * 1664525u + 1013904223u;
    const float mantissa = 1.0f + static_cast<float>(state >> 9) * 0x1p-23f;
    part = std::ldexp((state & 1) != 0 ? mantissa : -mantissa, static_cast<int>((state >> 1) % 40) - 20);
  }
  return parts;
}

inline std::vector<float> InOrder(const std::vector<int>& order, int64_t count) {
  std::vector<float> sum = Parts(order[0], count);
  for (size_t i = 1; i < order.size(); ++i) {
    const std::vector<float> part = Parts(order[i], count);
    for (size_t j = 0; j < sum.size(); ++j) sum[j] += part[j];
  }
  return sum;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.empty() || a.size() != b.size()) return a.size() == b.size();
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace lossd::kernels::collectives::testing

#endif  // LOSSD_TESTS_UNIT_COLLECTIVES_CASES_H_
