// Compiled more than once, with other instruction sets. LOSSD_ARITHMETIC names the accessor that this copy
// defines; the namespace Eigen is renamed on the compiler's command line in every copy but the baseline's, so
// that the linker never mixes their inline functions.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>

#include "client/examples/train_lm/arithmetic.h"

namespace lossd::train_lm {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using ConstMap = Eigen::Map<const Matrix>;
using Map = Eigen::Map<Matrix>;
using Array = Eigen::Map<Eigen::ArrayXf>;
using ConstArray = Eigen::Map<const Eigen::ArrayXf>;

void Product(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k) {
  Map(out, m, n).noalias() = ConstMap(a, m, k) * ConstMap(b, k, n);
}

void ProductBt(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k) {
  Map(out, m, n).noalias() = ConstMap(a, m, k) * ConstMap(b, n, k).transpose();
}

void AccumulateAt(const float* a, int64_t a_columns, int64_t first_column, const float* b, float* out,
                  int64_t m, int64_t n, int64_t k) {
  Map(out, m, n).noalias() +=
      ConstMap(a, k, a_columns).middleCols(first_column, m).transpose() * ConstMap(b, k, n);
}

// What is done by vectors goes through memory of its own, whose place is always the same: Eigen begins a
// vector at an address that suits it, and what lies before and behind is rounded otherwise.
constexpr int64_t kPart = 256;
using Part = Eigen::Array<float, Eigen::Dynamic, 1, Eigen::ColMajor, kPart, 1>;

double Softmax(float* row, int64_t vocabulary, int64_t label) {
  Array z(row, vocabulary);
  const float max = z.maxCoeff();
  const float target = z[label] - max;
  // Partial sums in fp64: a plain fp32 sum over the vocabulary would lose digits of the loss.
  double sum = 0;
  for (int64_t i = 0; i < vocabulary; i += kPart) {
    auto of_row = z.segment(i, std::min(kPart, vocabulary - i));
    Part part = of_row;
    part = (part - max).exp();
    sum += static_cast<double>(part.sum());
    of_row = part;
  }
  z *= static_cast<float>(1.0 / sum);
  return std::log(sum) - static_cast<double>(target);
}

void Adam(const AdamCoefficients& c, const float* gradient, float* first, float* second, float* parameters,
          int64_t n) {
  const ConstArray gradients(gradient, n);
  Array firsts(first, n);
  Array seconds(second, n);
  Array all_parameters(parameters, n);
  for (int64_t i = 0; i < n; i += kPart) {
    const int64_t count = std::min(kPart, n - i);
    const Part g = gradients.segment(i, count);
    Part m = firsts.segment(i, count);
    Part v = seconds.segment(i, count);
    Part w = all_parameters.segment(i, count);
    m = c.beta1 * m + (1 - c.beta1) * g;
    v = c.beta2 * v + (1 - c.beta2) * g.square();
    w = (1 - c.decay) * w - c.step_size * m / (v.sqrt() * c.root_correction + c.epsilon);
    firsts.segment(i, count) = m;
    seconds.segment(i, count) = v;
    all_parameters.segment(i, count) = w;
  }
}

}  // namespace

const Arithmetic& LOSSD_ARITHMETIC() {
  static constexpr Arithmetic kArithmetic = {LOSSD_ARITHMETIC_NAME, Product, ProductBt,
                                             AccumulateAt,          Softmax, Adam};
  return kArithmetic;
}

}  // namespace lossd::train_lm
