// Options of a batch whose rows have lists of tokens.
#ifndef LOSSD_TESTS_CONFORMANCE_LIST_OPTIONS_H_
#define LOSSD_TESTS_CONFORMANCE_LIST_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing {

struct ListOption {
  const char* name;
  void (*set)(Problem&);
};

inline std::vector<float> Spread(int64_t count, float low, float high) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = low + (high - low) * static_cast<float>((i * 37) % values.size()) / static_cast<float>(count);
  }
  return values;
}

inline constexpr ListOption kListOptions[] = {
    {"nothing", [](Problem&) {}},
    {"scale", [](Problem& p) { p.options.logit_scale = 0.3f; }},
    {"softcap", [](Problem& p) { p.options.softcap = 2.0f; }},
    {"z-loss", [](Problem& p) { p.options.lse_square_scale = 0.1f; }},
    {"z gradient scale",
     [](Problem& p) {
       p.options.lse_square_scale = 0.02f;
       p.z_gradient_scale = 3.0f;
     }},
    {"bias", [](Problem& p) { p.bias = Spread(p.shape.vocab, -2.0f, 2.0f); }},
    {"class weights", [](Problem& p) { p.class_weights = Spread(p.shape.vocab, 0.0f, 2.0f); }},
    {"token weights", [](Problem& p) { p.token_weights = Spread(p.shape.tokens, -0.5f, 2.0f); }},
    {"lse gradients", [](Problem& p) { p.lse_gradients = Spread(p.shape.tokens, -1.0f, 1.0f); }},
    {"entropy gradients", [](Problem& p) { p.entropy_gradients = Spread(p.shape.tokens, -1.0f, 1.0f); }},
};

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_LIST_OPTIONS_H_
