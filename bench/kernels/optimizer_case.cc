#include "bench/kernels/optimizer_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <thread>

#include "bench/kernels/measure.h"
#include "kernels/cpu/parallel.h"
#include "kernels/rounding.h"

namespace lossd::bench {

using kernels::DataType;
using kernels::GradientTally;
using kernels::SizeOf;

namespace {

constexpr int64_t kPiece = int64_t{1} << 20;

// Normal numbers; each thread has pieces of its own.
void FillNormal(std::vector<float>& values, float deviation, uint64_t seed) {
  const auto count = static_cast<int64_t>(values.size());
  kernels::cpu::ParallelFor(kernels::cpu::AvailableThreads(), kernels::CeilDivide(count, kPiece),
                            [&](int64_t piece, int64_t) {
                              std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(piece));
                              std::normal_distribution<float> normal(0, deviation);
                              const auto end = static_cast<size_t>(std::min(count, (piece + 1) * kPiece));
                              for (auto i = static_cast<size_t>(piece * kPiece); i < end; ++i) {
                                values[i] = normal(random);
                              }
                            });
}

void CopyInPieces(const std::vector<char>& from, std::vector<char>& to) {
  const auto bytes = static_cast<int64_t>(from.size());
  kernels::cpu::ParallelFor(kernels::cpu::AvailableThreads(), kernels::CeilDivide(bytes, kPiece),
                            [&](int64_t piece, int64_t) {
                              const int64_t first = piece * kPiece;
                              std::memcpy(&to[static_cast<size_t>(first)], &from[static_cast<size_t>(first)],
                                          static_cast<size_t>(std::min(kPiece, bytes - first)));
                            });
}

template <class T>
int64_t Differing(const std::vector<T>& a, const std::vector<T>& b) {
  int64_t differing = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto bits_of_a = std::as_bytes(std::span(&a[i], 1));
    const auto bits_of_b = std::as_bytes(std::span(&b[i], 1));
    if (!std::ranges::equal(bits_of_a, bits_of_b)) ++differing;
  }
  return differing;
}

kernels::OptimizerTensor ViewOf(OptimizerSample& sample, const OptimizerCase& of) {
  return {.count = static_cast<int64_t>(sample.gradient.size()),
          .gradient = sample.gradient.data(),
          .weight_type = of.dtype,
          .weight = sample.weight.data(),
          .master = of.has_master() ? sample.master.data() : nullptr,
          .first_moment = sample.first.data(),
          .second_moment = sample.second.data()};
}

// Pieces of the whole, computed alone by one thread.
std::string CheckCpu(const OptimizerCase& of, OptimizerSample& all, OptimizerResult* result) {
  constexpr int64_t kCount = 4099;
  const auto whole = static_cast<int64_t>(all.gradient.size());
  const int64_t count = std::min(kCount, whole);
  OptimizerSample expected(count, of);
  const auto first = static_cast<size_t>(whole - count);
  const size_t element = static_cast<size_t>(SizeOf(of.dtype));
  const auto take = [&](OptimizerSample& to) {
    std::copy_n(all.gradient.begin() + static_cast<int64_t>(first), count, to.gradient.begin());
    std::copy_n(all.first.begin() + static_cast<int64_t>(first), count, to.first.begin());
    std::copy_n(all.second.begin() + static_cast<int64_t>(first), count, to.second.begin());
    if (of.has_master()) {
      std::copy_n(all.master.begin() + static_cast<int64_t>(first), count, to.master.begin());
    }
    std::memcpy(to.weight.data(), &all.weight[first * element], static_cast<size_t>(count) * element);
  };
  take(expected);
  GradientTally tally;
  for (int64_t step = 1; step <= kCheckedStep; ++step) {
    tally = kernels::CpuApplyOptimizer(ViewOf(all, of), CoefficientsAt(of, step));
    expected.Apply(of, step);
  }
  OptimizerSample actual(count, of);
  take(actual);
  result->checked = count;
  if (Differences(actual, expected) != 0) return "a step of the whole is not that of its elements";
  CheckNorm(of, tally, result);
  return result->error;
}

}  // namespace

int64_t OptimizerCase::step_bytes() const {
  const int64_t worked_on = has_master() ? 4 : SizeOf(dtype);
  const int64_t moments = 8 * CoefficientsAt(*this, kCheckedStep).moments;
  return elements() * (4 + 2 * worked_on + (has_master() ? SizeOf(dtype) : 0) + moments);
}

OptimizerSample::OptimizerSample(int64_t count, const OptimizerCase& of)
    : gradient(static_cast<size_t>(count)),
      master(of.has_master() ? gradient.size() : 0),
      first(gradient.size()),
      second(gradient.size()),
      weight(gradient.size() * static_cast<size_t>(SizeOf(of.dtype))) {}

void OptimizerSample::Apply(const OptimizerCase& of, int64_t step) {
  kernels::CpuApplyOptimizer(ViewOf(*this, of), CoefficientsAt(of, step));
}

int64_t Differences(const OptimizerSample& a, const OptimizerSample& b) {
  return Differing(a.master, b.master) + Differing(a.first, b.first) + Differing(a.second, b.second) +
         Differing(a.weight, b.weight);
}

kernels::OptimizerCoefficients CoefficientsAt(const OptimizerCase& of, int64_t step) {
  kernels::OptimizerArguments arguments = of.arguments;
  arguments.step = step;
  return kernels::CoefficientsOf(arguments);
}

void CheckNorm(const OptimizerCase& of, const GradientTally& tally, OptimizerResult* result) {
  const auto count = static_cast<double>(of.elements());
  const double expected =
      static_cast<double>(kGradientDeviation) * std::abs(of.arguments.gradient_scale) * std::sqrt(count);
  result->norm_error = std::abs(std::sqrt(tally.squares) / expected - 1);
  // Six deviations of the norm of so many normal numbers, and what the generator's own numbers are off.
  const double tolerance = 6 / std::sqrt(2 * count) + 1e-4;
  if (!(result->norm_error < tolerance) || tally.non_finite != 0) {
    char text[120];
    std::snprintf(text, sizeof(text), "the gradient's norm is %.9g, of these numbers it has to be %.9g",
                  std::sqrt(tally.squares), expected);
    result->error = text;
  }
}

OptimizerResult RunCpuOptimizerCase(const OptimizerCase& of) {
  OptimizerResult result;
  result.hardware =
      "CPU, " + std::to_string(std::max(1U, std::thread::hardware_concurrency())) + " hardware threads";
  OptimizerSample all(of.elements(), of);
  FillNormal(all.gradient, kGradientDeviation, 1);
  std::vector<float> weight(static_cast<size_t>(of.elements()));
  FillNormal(weight, kWeightDeviation, 2);
  kernels::Convert(DataType::kFloat32, weight.data(), of.dtype, all.weight.data(), of.elements());
  if (of.has_master()) all.master = weight;
  result.error = CheckCpu(of, all, &result);
  if (!result.error.empty()) return result;
  std::vector<char> from(static_cast<size_t>(of.step_bytes() / 2), 'x');
  std::vector<char> to(from.size(), 'y');
  result.copy_bytes = static_cast<int64_t>(from.size()) * 2;
  std::vector<double> steps, copies, tallies, ratios;
  const kernels::OptimizerCoefficients coefficients = CoefficientsAt(of, kCheckedStep);
  for (int64_t round = 0; round < of.repetitions; ++round) {
    copies.push_back(Milliseconds([&] { CopyInPieces(from, to); }));
    steps.push_back(Milliseconds([&] { kernels::CpuApplyOptimizer(ViewOf(all, of), coefficients); }));
    tallies.push_back(
        Milliseconds([&] { kernels::CpuTallyGradient(all.gradient.data(), of.elements(), 1.0f); }));
    ratios.push_back(steps.back() / copies.back() * static_cast<double>(result.copy_bytes) /
                     static_cast<double>(of.step_bytes()));
  }
  result.step_ms = Median(steps);
  result.copy_ms = Median(copies);
  result.tally_ms = Median(tallies);
  result.ratio = Median(ratios);
  return result;
}

}  // namespace lossd::bench
