#include "kernels/cpu/gathered/gathered_products.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/parallel.h"

namespace lossd::kernels::cpu {
namespace {

// Columns at a time: what is widened, and sums in fp64, stay in the first cache.
constexpr int64_t kColumns = 256;
constexpr int64_t kEntriesPerTask = 64;

using Block = std::array<float, kColumns>;

// Columns [first, first + count) of a token's row of the weights.
const float* Widen(const GatheredWeights& weights, int32_t token, int64_t first, int64_t count,
                   Block& block) {
  const int64_t at = (token * weights.hidden + first) * SizeOf(weights.type);
  Convert(weights.type, static_cast<const char*>(weights.weight) + at, DataType::kFloat32, block.data(),
          count);
  return block.data();
}

// sum + x . those columns.
double AddProduct(const GatheredWeights& weights, int32_t token, int64_t first, int64_t count, const float* x,
                  double sum) {
  Block block;
  const float* w = Widen(weights, token, first, count, block);
#pragma omp simd reduction(+ : sum)
  for (int64_t h = 0; h < count; ++h) sum += static_cast<double>(x[h]) * w[h];
  return sum;
}

// From first on, those of one token.
void AddToken(std::span<const TokenEntry> entries, const float* x, int64_t hidden, float* dw, float* db) {
  const int64_t token = entries.front().token;
  for (int64_t first = 0; first < hidden; first += kColumns) {
    const int64_t count = std::min(kColumns, hidden - first);
    std::array<double, kColumns> sums{};
    for (const TokenEntry& entry : entries) {
      const float* from = x + entry.row * hidden + first;
      const double factor = entry.factor;
      for (int64_t h = 0; h < count; ++h) sums[h] += factor * from[h];
    }
    float* to = dw + token * hidden + first;
    for (int64_t h = 0; h < count; ++h) to[h] += static_cast<float>(sums[h]);
  }
  if (db == nullptr) return;
  double sum = 0;
  for (const TokenEntry& entry : entries) sum += entry.factor;
  db[token] += static_cast<float>(sum);
}

}  // namespace

void RoundStates(DataType type, const void* states, DataType weight_type, float* x, int64_t count) {
  Convert(type, states, DataType::kFloat32, x, count);
  if (weight_type == DataType::kFloat32) return;
  // Narrow halves lie before what is read next only if they do not overlap it: a block at a time.
  std::array<char, kColumns * 2> narrow;
  for (int64_t h = 0; h < count; h += kColumns) {
    const int64_t columns = std::min(kColumns, count - h);
    Convert(DataType::kFloat32, x + h, weight_type, narrow.data(), columns);
    Convert(weight_type, narrow.data(), DataType::kFloat32, x + h, columns);
  }
}

void GatherProducts(const GatheredWeights& weights, const float* x, std::span<const int32_t> tokens,
                    float* products) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    double sum = 0;
    for (int64_t first = 0; first < weights.hidden; first += kColumns) {
      const int64_t count = std::min(kColumns, weights.hidden - first);
      sum = AddProduct(weights, tokens[i], first, count, x + first, sum);
    }
    products[i] = static_cast<float>(sum);
  }
}

void GatherProducts(const GatheredWeights& weights, DataType type, const void* states,
                    std::span<const int32_t> tokens, float* products) {
  Block x;
  std::array<double, kMostAtOnce> sums{};
  for (int64_t first = 0; first < weights.hidden; first += kColumns) {
    const int64_t count = std::min(kColumns, weights.hidden - first);
    const char* from = static_cast<const char*>(states) + first * SizeOf(type);
    RoundStates(type, from, weights.type, x.data(), count);
    for (size_t i = 0; i < tokens.size(); ++i) {
      sums[i] = AddProduct(weights, tokens[i], first, count, x.data(), sums[i]);
    }
  }
  for (size_t i = 0; i < tokens.size(); ++i) products[i] = static_cast<float>(sums[i]);
}

void SumGathered(const GatheredWeights& weights, std::span<const int32_t> tokens, const float* factors,
                 DataType type, void* out) {
  Block block;
  for (int64_t first = 0; first < weights.hidden; first += kColumns) {
    const int64_t count = std::min(kColumns, weights.hidden - first);
    std::array<double, kColumns> sums{};
    for (size_t i = 0; i < tokens.size(); ++i) {
      const float* w = Widen(weights, tokens[i], first, count, block);
      const double factor = factors[i];
      for (int64_t h = 0; h < count; ++h) sums[h] += factor * w[h];
    }
    for (int64_t h = 0; h < count; ++h) block[h] = static_cast<float>(sums[h]);
    Convert(DataType::kFloat32, block.data(), type, static_cast<char*>(out) + first * SizeOf(type), count);
  }
}

void AddGathered(std::span<const TokenEntry> entries, const float* x, int64_t hidden, float* dw, float* db) {
  const auto size = static_cast<int64_t>(entries.size());
  const int64_t tasks = (size + kEntriesPerTask - 1) / kEntriesPerTask;
  ParallelFor(AvailableThreads(), tasks, [&](int64_t task, int64_t /*thread*/) {
    // Tokens whose first entry is one of the task's.
    const int64_t end = std::min(size, (task + 1) * kEntriesPerTask);
    for (int64_t i = task * kEntriesPerTask; i < end; ++i) {
      const int32_t token = entries[i].token;
      if (i > 0 && entries[i - 1].token == token) continue;
      int64_t last = i + 1;
      while (last < size && entries[last].token == token) ++last;
      AddToken(entries.subspan(i, last - i), x, hidden, dw, db);
    }
  });
}

}  // namespace lossd::kernels::cpu
