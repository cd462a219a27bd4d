#include "bench/kernels/traffic.h"

#include <initializer_list>

#include "kernels/rounding.h"

namespace lossd::bench {
namespace {

constexpr double kWide = 4;           // bytes of an fp32 value
constexpr double kSampleRows = 128;   // of W, whose logits tell a row's magnitude
constexpr int64_t kSumColumns = 192;  // of the vocabulary have one partial sum a row

double Bytes(kernels::DataType type) { return static_cast<double>(kernels::SizeOf(type)); }

// Bytes alone: operations beyond the products that were asked for are the price of an algorithm.
Work StagesWork(std::initializer_list<const char*> stages, const StepShape& shape) {
  Work work;
  for (const char* stage : stages) work.bytes += StageWork(stage, shape).bytes;
  return work;
}

}  // namespace

const char* ProductName(Product product) {
  switch (product) {
    case Product::kLogits:
      return "logits";
    case Product::kInputGradient:
      return "dx";
    case Product::kWeightGradient:
      return "dw";
  }
  return "";
}

Work ProductWork(Product product, int64_t rows, int64_t vocab, int64_t hidden, kernels::DataType type,
                 kernels::DataType result) {
  const auto n = static_cast<double>(rows);
  const auto v = static_cast<double>(vocab);
  const auto h = static_cast<double>(hidden);
  const double z = n * v * Bytes(product == Product::kLogits ? result : type);
  const double x = n * h * Bytes(product == Product::kInputGradient ? result : type);
  const double w = v * h * (product == Product::kWeightGradient ? 2 * kWide : Bytes(type));
  return {2 * n * v * h, z + x + w};
}

Work StageWork(const std::string& stage, const StepShape& shape) {
  const auto n = static_cast<double>(shape.rows);
  const auto v = static_cast<double>(shape.vocab);
  const auto h = static_cast<double>(shape.hidden);
  const auto tiles = static_cast<double>(kernels::CeilDivide(shape.rows, shape.tile_rows));
  const double element = Bytes(shape.type);
  const bool hopper = shape.holds == StepShape::Holds::kExponentials;
  const double product = 2 * n * v * h;
  const double rows_of_x = n * h * element;
  const double weight = tiles * v * h * element;
  const double e = n * v * element;
  const double wide_logits = n * v * kWide;
  const double sums = n * static_cast<double>(kernels::CeilDivide(shape.vocab, kSumColumns)) * kWide;
  // X in, its rounded copy out, the labels' rows of W in.
  if (stage == "prepare") return {0, 3 * rows_of_x};
  if (stage == "offsets" && hopper) {
    const bool all = shape.type == kernels::DataType::kFloat16;
    return {2 * n * h * (all ? v : kSampleRows),
            rows_of_x + (all ? weight : tiles * kSampleRows * h * element)};
  }
  if (stage == "logits") return {product, rows_of_x + weight + (hopper ? e + sums : wide_logits)};
  if (stage == "rows") return {0, hopper ? sums : wide_logits + e};
  // E, W and the labels' rows of W in, dX out; kLogits keeps the sums in fp32 on the way.
  if (stage == "dx") return {product, e + weight + 2 * rows_of_x + (hopper ? 0 : 2 * n * h * kWide)};
  // The scaled copy of X is made first: in, out, and in again. dW in and out.
  if (stage == "dw") return {product, e + 3 * rows_of_x + tiles * 2 * v * h * kWide};
  // X in, the labels' rows of dW in and out.
  if (stage == "targets") return {0, rows_of_x + 2 * n * h * kWide};
  return {};
}

Work StepWork(const StepShape& shape) {
  Work work = StagesWork({"prepare", "offsets", "logits", "rows", "dx", "dw", "targets"}, shape);
  work.operations = 3 * StageWork("logits", shape).operations;
  return work;
}

Work ForwardWork(const StepShape& shape) {
  Work work = StagesWork({"prepare", "offsets", "logits", "rows"}, shape);
  work.operations = StageWork("logits", shape).operations;
  if (shape.holds == StepShape::Holds::kExponentials) {
    work.bytes -= static_cast<double>(shape.rows) * static_cast<double>(shape.vocab) * Bytes(shape.type);
  }
  return work;
}

}  // namespace lossd::bench
