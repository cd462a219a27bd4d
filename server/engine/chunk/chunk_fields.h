// The members of heads' configurations, and of what chunks say of their losses and get back, by name
// (common/fields.h).
#ifndef LOSSD_SERVER_ENGINE_CHUNK_CHUNK_FIELDS_H_
#define LOSSD_SERVER_ENGINE_CHUNK_CHUNK_FIELDS_H_

#include <array>
#include <tuple>
#include <utility>

#include "kernels/linear_cross_entropy.h"
#include "kernels/loss_options.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/common/fields.h"

namespace lossd::kernels {

template <class Visit>
void Fields(Visit& visit, engine::Is<LossOptions> auto& options) {
  std::apply([&](const auto&... option) { engine::FieldsBy(visit, options, option...); },
             std::to_array(kLossOptions));
}

template <class Visit>
void Fields(Visit& visit, engine::Is<Distillation> auto& distillation) {
  auto& [divergence, beta, temperature, weight, label_weight] = distillation;
  visit("divergence", divergence, "beta", beta, "temperature", temperature, "weight", weight, "label_weight",
        label_weight);
}

}  // namespace lossd::kernels

namespace lossd::engine {

template <class Visit>
void Fields(Visit& visit, Is<OptimizerConfig> auto& config) {
  std::apply([&](const auto&... field) { FieldsBy(visit, config, field...); }, kOptimizerFields);
}

template <class Visit>
void Fields(Visit& visit, Is<HeadConfig> auto& config) {
  constexpr ConfigField kClassWeights{"class_weights", &HeadConfig::class_weights};
  std::apply([&](const auto&... field) { FieldsBy(visit, config, field..., kClassWeights); }, kHeadFields);
}
inline const char* FaultOf(const HeadConfig& config) {
  if (config.class_weights == nullptr) return nullptr;
  const bool one_each = std::cmp_equal(config.class_weights->size(), config.vocab_size);
  return one_each ? nullptr : "has more or fewer class_weights than its vocab_size";
}

template <class Visit>
void Fields(Visit& visit, Is<WantedReturns> auto& wanted) {
  auto& [log_sum_exp, z_loss, log_probability, entropy, prediction, target_rank, divergence, top_k] = wanted;
  visit("log_sum_exp", log_sum_exp, "z_loss", z_loss, "log_probability", log_probability, "entropy", entropy,
        "prediction", prediction, "target_rank", target_rank, "divergence", divergence, "top_k", top_k);
}

template <class Visit>
void Fields(Visit& visit, Is<TokenReturns> auto& returns) {
  auto& [log_sum_exp, z_losses, log_probabilities, entropies, predictions, target_ranks, divergences,
         top_tokens, top_log_probabilities] = returns;
  visit("log_sum_exp", log_sum_exp, "z_losses", z_losses, "log_probabilities", log_probabilities, "entropies",
        entropies, "predictions", predictions, "target_ranks", target_ranks, "divergences", divergences,
        "top_tokens", top_tokens, "top_log_probabilities", top_log_probabilities);
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_CHUNK_FIELDS_H_
