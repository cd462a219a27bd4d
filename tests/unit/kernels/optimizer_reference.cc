#include "tests/unit/kernels/optimizer_reference.h"

#include <cmath>
#include <random>

namespace lossd::kernels::testing {
namespace {

void Sgd(const OptimizerArguments& a, double gradient, double& theta, double& buffer) {
  double g = a.maximize ? -gradient : gradient;
  g += a.weight_decay * theta;
  if (a.momentum != 0) {
    buffer = a.step == 1 ? g : a.momentum * buffer + (1 - a.dampening) * g;
    g = a.nesterov ? g + a.momentum * buffer : buffer;
  }
  theta -= a.learning_rate * g;
}

void Adam(const OptimizerArguments& a, double gradient, double& theta, double& m, double& v) {
  double g = a.maximize ? -gradient : gradient;
  if (a.rule == OptimizerRule::kAdamW) {
    theta -= a.learning_rate * a.weight_decay * theta;
  } else {
    g += a.weight_decay * theta;
  }
  m = a.beta1 * m + (1 - a.beta1) * g;
  v = a.beta2 * v + (1 - a.beta2) * g * g;
  const double m_hat = m / (1 - std::pow(a.beta1, static_cast<double>(a.step)));
  const double v_hat = v / (1 - std::pow(a.beta2, static_cast<double>(a.step)));
  theta -= a.learning_rate * m_hat / (std::sqrt(v_hat) + a.eps);
}

}  // namespace

void ReferenceStep(const OptimizerArguments& arguments, const std::vector<float>& gradient,
                   ReferenceTensor* tensor) {
  tensor->first.resize(tensor->weight.size());
  tensor->second.resize(tensor->weight.size());
  for (size_t i = 0; i < tensor->weight.size(); ++i) {
    const double g = arguments.gradient_scale * static_cast<double>(gradient[i]);
    if (arguments.rule == OptimizerRule::kSgd) {
      Sgd(arguments, g, tensor->weight[i], tensor->first[i]);
    } else {
      Adam(arguments, g, tensor->weight[i], tensor->first[i], tensor->second[i]);
    }
  }
}

std::vector<NamedOptimizer> OptimizersUnderTest() {
  const OptimizerArguments sgd{.rule = OptimizerRule::kSgd, .learning_rate = 0.05};
  OptimizerArguments decayed = sgd;
  decayed.weight_decay = 0.1;
  decayed.gradient_scale = 0.37;
  OptimizerArguments momentum = decayed;
  momentum.momentum = 0.9;
  OptimizerArguments dampened = momentum;
  dampened.dampening = 0.3;
  dampened.maximize = true;
  OptimizerArguments nesterov = momentum;
  nesterov.nesterov = true;
  const OptimizerArguments adam{.rule = OptimizerRule::kAdam, .learning_rate = 1e-2};
  OptimizerArguments adam_decayed = adam;
  adam_decayed.weight_decay = 0.2;
  adam_decayed.beta1 = 0.3;  // torch.lerp goes the other way
  adam_decayed.beta2 = 0.95;
  adam_decayed.eps = 1e-3;
  adam_decayed.gradient_scale = 1.0 / 1024;
  OptimizerArguments adamw = adam;
  adamw.rule = OptimizerRule::kAdamW;
  adamw.weight_decay = 0.1;
  OptimizerArguments adamw_maximizing = adamw;
  adamw_maximizing.maximize = true;
  adamw_maximizing.beta2 = 1 - 1e-9;  // 1 - beta2 has to be made in fp64
  return {{"sgd", sgd},
          {"sgd_decayed", decayed},
          {"momentum", momentum},
          {"dampened", dampened},
          {"nesterov", nesterov},
          {"adam", adam},
          {"adam_decayed", adam_decayed},
          {"adamw", adamw},
          {"adamw_maximizing", adamw_maximizing}};
}

std::vector<float> NormalFloats(int64_t count, double deviation, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(normal(random));
  return values;
}

}  // namespace lossd::kernels::testing
