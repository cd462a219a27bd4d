#include "tests/conformance/row_return_values.h"

#include <algorithm>
#include <cstring>

namespace lossd::engine::testing {
namespace {

using kernels::testing::GuardedBytes;

// Room for 4-byte elements, aligned to no more than that, and filled with what no result is.
GuardedBytes Array(int64_t elements) {
  GuardedBytes array(elements * 4, 64, 4);
  std::memset(array.data(), 0xee, static_cast<size_t>(array.size()));
  return array;
}

template <typename T>
T* PointerTo(GuardedBytes& array) {
  return array.size() > 0 ? array.As<T>() : nullptr;
}

template <typename T>
std::vector<T> ValuesOf(const GuardedBytes& array) {
  std::vector<T> values(static_cast<size_t>(array.size()) / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), array.data(), values.size() * sizeof(T));
  return values;
}

template <typename T>
bool Same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace

bool SameBits(const RowReturnValues& a, const RowReturnValues& b) {
  return Same(a.log_sum_exp, b.log_sum_exp) && Same(a.z_loss, b.z_loss) &&
         Same(a.log_probability, b.log_probability) && Same(a.entropy, b.entropy) &&
         Same(a.prediction, b.prediction) && Same(a.target_rank, b.target_rank) &&
         Same(a.divergence, b.divergence) && Same(a.top_tokens, b.top_tokens) &&
         Same(a.top_log_probabilities, b.top_log_probabilities);
}

GuardedReturns::GuardedReturns(const WantedReturns& wanted, int64_t tokens)
    : top_k_(wanted.top_k),
      log_sum_exp_(Array(wanted.log_sum_exp ? tokens : 0)),
      z_loss_(Array(wanted.z_loss ? tokens : 0)),
      log_probability_(Array(wanted.log_probability ? tokens : 0)),
      entropy_(Array(wanted.entropy ? tokens : 0)),
      prediction_(Array(wanted.prediction ? tokens : 0)),
      target_rank_(Array(wanted.target_rank ? tokens : 0)),
      divergence_(Array(wanted.divergence ? tokens : 0)),
      top_tokens_(Array(tokens * wanted.top_k)),
      top_log_probabilities_(Array(tokens * wanted.top_k)) {}

kernels::RowReturns GuardedReturns::Pointers() {
  return {.log_sum_exp = PointerTo<float>(log_sum_exp_),
          .z_loss = PointerTo<float>(z_loss_),
          .log_probability = PointerTo<float>(log_probability_),
          .entropy = PointerTo<float>(entropy_),
          .prediction = PointerTo<int32_t>(prediction_),
          .target_rank = PointerTo<int32_t>(target_rank_),
          .divergence = PointerTo<float>(divergence_),
          .top_k = top_k_,
          .top_tokens = PointerTo<int32_t>(top_tokens_),
          .top_log_probabilities = PointerTo<float>(top_log_probabilities_)};
}

RowReturnValues GuardedReturns::Values() const {
  return {.log_sum_exp = ValuesOf<float>(log_sum_exp_),
          .z_loss = ValuesOf<float>(z_loss_),
          .log_probability = ValuesOf<float>(log_probability_),
          .entropy = ValuesOf<float>(entropy_),
          .prediction = ValuesOf<int32_t>(prediction_),
          .target_rank = ValuesOf<int32_t>(target_rank_),
          .divergence = ValuesOf<float>(divergence_),
          .top_tokens = ValuesOf<int32_t>(top_tokens_),
          .top_log_probabilities = ValuesOf<float>(top_log_probabilities_)};
}

bool GuardedReturns::Intact() const {
  return std::ranges::all_of(
      std::initializer_list<const Bytes*>{&log_sum_exp_, &z_loss_, &log_probability_, &entropy_, &prediction_,
                                          &target_rank_, &divergence_, &top_tokens_, &top_log_probabilities_},
      [](const Bytes* array) { return array->Intact(); });
}

}  // namespace lossd::engine::testing
