#include "kernels/optimizer.h"

#include <cmath>

namespace lossd::kernels {
namespace {

void SetSgd(const OptimizerArguments& a, OptimizerCoefficients* c) {
  c->moments = a.momentum == 0 ? 0 : 1;
  c->step_size = static_cast<float>(a.learning_rate);
  c->momentum = static_cast<float>(a.momentum);
  c->fresh = static_cast<float>(1 - a.dampening);
  c->nesterov = a.nesterov;
  c->first_step = a.step == 1;
}

void SetAdam(const OptimizerArguments& a, OptimizerCoefficients* c) {
  const auto step = static_cast<double>(a.step);
  c->moments = 2;
  c->step_size = static_cast<float>(a.learning_rate / (1 - std::pow(a.beta1, step)));
  c->lerp_weight = static_cast<float>(1 - a.beta1);
  c->lerp_rest = static_cast<float>(a.beta1);
  c->lerp_from_end = 1 - a.beta1 >= 0.5;
  c->beta2 = static_cast<float>(a.beta2);
  c->beta2_rest = static_cast<float>(1 - a.beta2);
  c->second_root = static_cast<float>(std::sqrt(1 - std::pow(a.beta2, step)));
  c->eps = static_cast<float>(a.eps);
}

}  // namespace

OptimizerCoefficients CoefficientsOf(const OptimizerArguments& arguments) {
  OptimizerCoefficients c;
  c.scale = static_cast<float>(arguments.maximize ? -arguments.gradient_scale : arguments.gradient_scale);
  if (arguments.rule == OptimizerRule::kSgd) {
    SetSgd(arguments, &c);
  } else {
    SetAdam(arguments, &c);
  }
  if (arguments.rule == OptimizerRule::kAdamW) {
    c.kept_weight = static_cast<float>(1 - arguments.learning_rate * arguments.weight_decay);
  } else {
    c.added_decay = static_cast<float>(arguments.weight_decay);
  }
  return c;
}

}  // namespace lossd::kernels
