#include "kernels/cpu/gathered/target_rows.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/constants.h"
#include "kernels/cpu/gathered/capped_logit.h"
#include "kernels/cpu/gathered/gathered_products.h"

namespace lossd::kernels::cpu {
namespace {

// log(e^a + e^b).
double LogAdd(double a, double b) {
  const double largest = std::max(a, b);
  return largest == -kInfinity ? largest : largest + std::log1p(std::exp(std::min(a, b) - largest));
}

void Add(int32_t token, double q, double s, int64_t label, TargetSums* sums) {
  sums->mass += q;
  if (q > 0) {
    sums->cross += q * s;
    sums->negentropy += q * std::log(q);
  }
  sums->log_sum_exp = LogAdd(sums->log_sum_exp, s);
  if (token != label) return;
  sums->own = static_cast<float>(q);
  sums->has_own = true;
}

}  // namespace

TargetSums SumTargets(const LinearCrossEntropyParams& params, int64_t index) {
  const GatheredWeights weights{params.weight_type, params.weight, params.hidden};
  const char* states =
      static_cast<const char*>(params.hidden_states) + index * params.hidden * SizeOf(params.hidden_type);
  const TargetRow row = TargetRowOf(params.target_lists, index);
  TargetSums sums;
  sums.log_sum_exp = -kInfinity;
  sums.has_all = static_cast<int64_t>(row.tokens.size()) == params.vocab;
  for (size_t first = 0; first < row.tokens.size(); first += kMostAtOnce) {
    const auto tokens = row.tokens.subspan(first, std::min(kMostAtOnce, row.tokens.size() - first));
    std::array<float, kMostAtOnce> products;
    GatherProducts(weights, params.hidden_type, states, tokens, products.data());
    for (size_t i = 0; i < tokens.size(); ++i) {
      float z = products[i];
      if (params.bias != nullptr) z += params.bias[tokens[i]];
      z *= params.options.logit_scale;
      const double s = Cap(z, params.options.softcap).value;
      Add(tokens[i], row.probabilities[first + i], s, params.labels[index], &sums);
    }
  }
  return sums;
}

}  // namespace lossd::kernels::cpu
