#include "client/examples/train_lm/arithmetic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace lossd::train_lm::arithmetic_test {
namespace {

constexpr int64_t kPlaces = 16;  // from one line of the cache to the next, in floats

// Numbers that lie `place` floats behind the beginning of a line.
class Placed {
 public:
  Placed(int64_t count, int64_t place, float seed) : memory_(static_cast<size_t>(count + 2 * kPlaces)) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data()) / sizeof(float);
    const auto to_line = static_cast<int64_t>((kPlaces - address % kPlaces) % kPlaces);
    data_ = memory_.data() + to_line + place;
    for (int64_t i = 0; i < count; ++i) {
      data_[i] = std::sin(seed + static_cast<float>(i) * 1.37F) * std::exp(-0.01F * static_cast<float>(i));
    }
    count_ = count;
  }
  float* data() { return data_; }
  std::vector<float> Copy() const { return {data_, data_ + count_}; }

 private:
  std::vector<float> memory_;
  float* data_;
  int64_t count_;
};

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b, int64_t place) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << "at place " << place;
}

// A run that goes on with what it had saved has its numbers elsewhere in memory.
TEST(Arithmetic, AdamHasTheSameBitsWhereverItsNumbersLie) {
  constexpr int64_t kCount = 203;
  const AdamCoefficients coefficients = {.step_size = 3e-3F,
                                         .decay = 1e-4F,
                                         .beta1 = 0.9F,
                                         .beta2 = 0.95F,
                                         .root_correction = 1.7F,
                                         .epsilon = 1e-8F};
  const auto run = [&](int64_t place) {
    Placed gradient(kCount, (place * 3) % kPlaces, 1);
    Placed first(kCount, place, 2);
    Placed second(kCount, (place * 5) % kPlaces, 3);
    Placed parameters(kCount, place, 4);
    for (int64_t i = 0; i < kCount; ++i) second.data()[i] = std::abs(second.data()[i]);
    for (int step = 0; step < 500; ++step) {
      BestArithmetic().adam(coefficients, gradient.data(), first.data(), second.data(), parameters.data(),
                            kCount);
    }
    std::vector<float> all = parameters.Copy();
    for (const Placed* other : {&first, &second}) {
      const std::vector<float> copy = other->Copy();
      all.insert(all.end(), copy.begin(), copy.end());
    }
    return all;
  };
  const std::vector<float> aligned = run(0);
  for (int64_t place = 1; place < kPlaces; ++place) ExpectSameBits(run(place), aligned, place);
}

TEST(Arithmetic, ProductsHaveTheSameBitsWhereverTheirMatricesLie) {
  constexpr int64_t kM = 37;
  constexpr int64_t kN = 43;
  constexpr int64_t kK = 51;
  const auto run = [&](int64_t place) {
    Placed a(kM * kK, place, 1);
    Placed b(kK * kN, (place * 3) % kPlaces, 2);
    Placed out(kM * kN, (place * 5) % kPlaces, 3);
    const Arithmetic& arithmetic = BestArithmetic();
    arithmetic.product(a.data(), b.data(), out.data(), kM, kN, kK);
    std::vector<float> all = out.Copy();
    arithmetic.product_bt(a.data(), b.data(), out.data(), kM, kN, kK);
    const std::vector<float> transposed = out.Copy();
    all.insert(all.end(), transposed.begin(), transposed.end());
    arithmetic.accumulate_at(a.data(), kM, 0, b.data(), out.data(), kM, kN, kK);
    const std::vector<float> added = out.Copy();
    all.insert(all.end(), added.begin(), added.end());
    return all;
  };
  const std::vector<float> aligned = run(0);
  for (int64_t place = 1; place < kPlaces; ++place) ExpectSameBits(run(place), aligned, place);
}

TEST(Arithmetic, ASoftmaxHasTheSameBitsWhereverItsRowLies) {
  constexpr int64_t kVocabulary = 700;
  const auto run = [&](int64_t place) {
    Placed row(kVocabulary, place, 1);
    const auto loss = static_cast<float>(BestArithmetic().softmax(row.data(), kVocabulary, 17));
    std::vector<float> all = row.Copy();
    all.push_back(loss);
    return all;
  };
  const std::vector<float> aligned = run(0);
  for (int64_t place = 1; place < kPlaces; ++place) ExpectSameBits(run(place), aligned, place);
}

}  // namespace
}  // namespace lossd::train_lm::arithmetic_test
