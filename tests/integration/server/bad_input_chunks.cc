#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/server/bad_input.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;

Case Content(std::string name, RejectReason reason, std::string field, std::vector<std::string> message,
             std::function<void(v1::Chunk&)> spoil) {
  return {std::move(name),
          [spoil = std::move(spoil)](Environment& environment) {
            v1::Chunk chunk = environment.Good();
            spoil(chunk);
            return environment.Content(chunk);
          },
          grpc::StatusCode::INVALID_ARGUMENT,
          std::move(message),
          reason,
          std::move(field)};
}

Case WithCode(Case test_case, int code) {
  test_case.code = code;
  return test_case;
}

// Soft targets that are in order: of the chunk's own head and its own hidden states.
v1::Distillation& Teach(v1::Chunk& chunk) {
  chunk.set_teacher_hidden_states(chunk.hidden_states());
  v1::Distillation& soft = *chunk.mutable_options()->mutable_distillation();
  soft.set_teacher("h");
  soft.set_hidden_dtype(v1::DATA_TYPE_FLOAT32);
  soft.set_divergence(v1::DIVERGENCE_FORWARD_KL);
  soft.set_weight(1);
  return soft;
}

// Lists of two tokens: each label and the token behind it.
void SetLists(v1::Chunk& chunk, const std::vector<int64_t>& offsets, const std::vector<int32_t>& ids) {
  v1::TokenLists& lists = *chunk.mutable_token_inputs()->mutable_kept_tokens();
  lists.set_offsets(offsets.data(), offsets.size() * sizeof(int64_t));
  lists.set_ids(ids.data(), ids.size() * sizeof(int32_t));
}
using Offsets = std::vector<int64_t>;
using Ids = std::vector<int32_t>;
void Keep(v1::Chunk& chunk, const std::function<void(Offsets&, Ids&)>& spoil) {
  Offsets offsets = {0};
  Ids ids;
  for (int64_t token = 0; token < chunk.tokens(); ++token) {
    int64_t label = 0;
    std::memcpy(&label, chunk.labels().data() + token * 8, 8);
    ids.push_back(static_cast<int32_t>(label));
    ids.push_back(static_cast<int32_t>((label + 1) % kInputVocab));
    offsets.push_back(static_cast<int64_t>(ids.size()));
  }
  spoil(offsets, ids);
  SetLists(chunk, offsets, ids);
}
void Keep(v1::Chunk& chunk) {
  Keep(chunk, [](Offsets&, Ids&) {});
}
Case Lists(std::string name, RejectReason reason, const std::string& field, std::vector<std::string> message,
           const std::function<void(Offsets&, Ids&)>& spoil) {
  return Content(std::move(name), reason, "token_inputs.kept_tokens" + field, std::move(message),
                 [spoil](v1::Chunk& chunk) { Keep(chunk, spoil); });
}

// The same lists as soft targets: the first of each probable to three quarters, the other to a quarter.
using Spoil = std::function<void(v1::TargetLists&)>;
void Target(
    v1::Chunk& chunk, const Spoil& spoil = [](v1::TargetLists&) {}) {
  Keep(chunk);
  v1::TokenInputs& inputs = *chunk.mutable_token_inputs();
  v1::TargetLists& targets = *inputs.mutable_target_lists();
  targets.mutable_lists()->Swap(inputs.mutable_kept_tokens());
  inputs.clear_kept_tokens();
  targets.set_weight(1);
  std::vector<float> probabilities;
  for (int64_t token = 0; token < chunk.tokens(); ++token) {
    probabilities.push_back(0.75F);
    probabilities.push_back(0.25F);
  }
  targets.set_probabilities(probabilities.data(), probabilities.size() * sizeof(float));
  spoil(targets);
}
Case Targets(std::string name, RejectReason reason, const std::string& field,
             std::vector<std::string> message, const Spoil& spoil) {
  return Content(std::move(name), reason, "token_inputs.target_lists" + field, std::move(message),
                 [spoil](v1::Chunk& chunk) { Target(chunk, spoil); });
}
void SetProbability(v1::TargetLists& targets, int64_t index, float value) {
  std::memcpy(targets.mutable_probabilities()->data() + index * 4, &value, 4);
}
void SetId(v1::TargetLists& targets, int64_t index, int32_t id) {
  std::memcpy(targets.mutable_lists()->mutable_ids()->data() + index * 4, &id, 4);
}

void SetHidden(v1::Chunk& chunk, int64_t index, float value) {
  std::memcpy(chunk.mutable_hidden_states()->data() + index * 4, &value, 4);
}

}  // namespace

std::vector<Case> ContentCases() {
  return {
      Content("wrong_shape", RejectReason::kLength, "hidden_states", {"576", "512", "[16, 8]"},
              [](v1::Chunk& chunk) { chunk.mutable_hidden_states()->resize(16 * 9 * 4); }),
      Content("dtype_not_given", RejectReason::kDtype, "hidden_dtype", {"hidden_dtype is 0"},
              [](v1::Chunk& chunk) { chunk.set_hidden_dtype(v1::DATA_TYPE_UNSPECIFIED); }),
      Content("payload_of_another_dtype", RejectReason::kLength, "hidden_states", {"512", "256", "bfloat16"},
              [](v1::Chunk& chunk) { chunk.set_hidden_dtype(v1::DATA_TYPE_BFLOAT16); }),
      Content("label_too_large", RejectReason::kLabel, "labels", {"labels[3] is 64", "[0, 64)", "-100"},
              [](v1::Chunk& chunk) { SetLabel(chunk, 3, kInputVocab); }),
      Content("label_negative", RejectReason::kLabel, "labels", {"labels[15] is -1", "[0, 64)"},
              [](v1::Chunk& chunk) { SetLabel(chunk, 15, -1); }),
      Content("label_not_the_ignore_index", RejectReason::kLabel, "labels",
              {"labels[0] is -100", "ignore_index -7"},
              [](v1::Chunk& chunk) {
                SetLabel(chunk, 0, -100);
                chunk.set_ignore_index(-7);
              }),
      Content("hidden_states_too_short", RejectReason::kLength, "hidden_states", {"511", "512"},
              [](v1::Chunk& chunk) { chunk.mutable_hidden_states()->resize(511); }),
      Content("hidden_states_too_long", RejectReason::kLength, "hidden_states", {"513", "512"},
              [](v1::Chunk& chunk) { chunk.mutable_hidden_states()->resize(513); }),
      Content("labels_too_short", RejectReason::kLength, "labels", {"120", "128"},
              [](v1::Chunk& chunk) { chunk.mutable_labels()->resize(120); }),
      Content("no_payload", RejectReason::kLength, "labels", {"0", "128"},
              [](v1::Chunk& chunk) {
                chunk.clear_labels();
                chunk.clear_hidden_states();
              }),
      Content("chunk_over_the_limit", RejectReason::kChunkTooLarge, "hidden_states", {"4128", "4096"},
              [](v1::Chunk& chunk) {
                chunk = MakeChunk(chunk.sequence(), 1, 129, kInputVocab, kInputHidden, 5);
              }),
      Content("too_many_tokens", RejectReason::kChunkTooLarge, "tokens", {"257", "256"},
              [](v1::Chunk& chunk) { chunk.set_tokens(257); }),
      Content("tokens_that_overflow", RejectReason::kChunkTooLarge, "tokens", {"4611686018427387904", "256"},
              [](v1::Chunk& chunk) { chunk.set_tokens(int64_t{1} << 62); }),
      Content("zero_rows", RejectReason::kNoTokens, "tokens", {"tokens is 0", "at least 1"},
              [](v1::Chunk& chunk) {
                chunk.set_tokens(0);
                chunk.clear_labels();
                chunk.clear_hidden_states();
              }),
      Content("negative_rows", RejectReason::kNoTokens, "tokens", {"tokens is -5", "at least 1"},
              [](v1::Chunk& chunk) { chunk.set_tokens(-5); }),
      Content("nan_hidden_state", RejectReason::kNonFinite, "hidden_states", {"1 non-finite", "128"},
              [](v1::Chunk& chunk) { SetHidden(chunk, 77, std::numeric_limits<float>::quiet_NaN()); }),
      Content("infinite_hidden_states", RejectReason::kNonFinite, "hidden_states", {"2 non-finite"},
              [](v1::Chunk& chunk) {
                SetHidden(chunk, 0, std::numeric_limits<float>::infinity());
                SetHidden(chunk, 127, -std::numeric_limits<float>::infinity());
              }),
      Content("nan_gradient_scale", RejectReason::kOption, "gradient_scale", {"nan", "finite"},
              [](v1::Chunk& chunk) { chunk.set_gradient_scale(std::numeric_limits<float>::quiet_NaN()); }),
      Content("nan_label_smoothing", RejectReason::kOption, "options.label_smoothing", {"nan", "[0, 1]"},
              [](v1::Chunk& chunk) {
                chunk.mutable_options()->set_label_smoothing(std::numeric_limits<float>::quiet_NaN());
              }),
      Content("negative_z_loss", RejectReason::kOption, "options.lse_square_scale", {"is -1", "at least 0"},
              [](v1::Chunk& chunk) { chunk.mutable_options()->set_lse_square_scale(-1); }),
      Content("negative_softcap", RejectReason::kOption, "options.softcap", {"is -30", "above 0"},
              [](v1::Chunk& chunk) { chunk.mutable_options()->set_softcap(-30); }),
      Content("logit_scale_of_zero", RejectReason::kOption, "options.logit_scale", {"is 0", "above 0"},
              [](v1::Chunk& chunk) { chunk.mutable_options()->set_logit_scale(0); }),
      Content("bias_of_a_head_without", RejectReason::kOption, "options.bias", {"is true", "without a bias"},
              [](v1::Chunk& chunk) { chunk.mutable_options()->set_bias(true); }),
      Content("class_weights_of_a_head_without", RejectReason::kOption, "options.class_weights",
              {"head h was created without class weights"},
              [](v1::Chunk& chunk) { chunk.mutable_options()->set_class_weights(true); }),
      Content("infinite_z_gradient_scale", RejectReason::kOption, "options.z_gradient_scale",
              {"inf", "finite"},
              [](v1::Chunk& chunk) {
                chunk.mutable_options()->set_z_gradient_scale(std::numeric_limits<float>::infinity());
              }),
      Content("top_k_over_the_limit", RejectReason::kOption, "options.returns.top_k", {"is 65", "[0, 64]"},
              [](v1::Chunk& chunk) { chunk.mutable_options()->mutable_returns()->set_top_k(65); }),
      Content("token_weights_too_short", RejectReason::kLength, "token_inputs.weights", {"63", "64"},
              [](v1::Chunk& chunk) { chunk.mutable_token_inputs()->mutable_weights()->resize(63); }),
      Content(
          "nan_lse_gradient", RejectReason::kNonFinite, "token_inputs.lse_gradients", {"[0] is nan"},
          [](v1::Chunk& chunk) { chunk.mutable_token_inputs()->set_lse_gradients(std::string(64, '\xff')); }),
      Content("entropy_gradients_too_long", RejectReason::kLength, "token_inputs.entropy_gradients",
              {"65", "64"},
              [](v1::Chunk& chunk) {
                chunk.mutable_token_inputs()->set_entropy_gradients(std::string(65, '\0'));
              }),
      Content("nan_entropy_gradient", RejectReason::kNonFinite, "token_inputs.entropy_gradients",
              {"[0] is nan"},
              [](v1::Chunk& chunk) {
                chunk.mutable_token_inputs()->set_entropy_gradients(std::string(64, '\xff'));
              }),
      Content("negative_place_in_a_hold", RejectReason::kOption, "hold.first_token", {"is -1", "in [0, "},
              [](v1::Chunk& chunk) {
                chunk.mutable_hold()->set_number(1);
                chunk.mutable_hold()->set_first_token(-1);
              }),
      Content("hidden_states_held_for_no_batch", RejectReason::kOption, "hold.number", {"is 0"},
              [](v1::Chunk& chunk) { chunk.mutable_hold()->set_hidden_states(true); }),
      Content("hidden_states_of_no_batch", RejectReason::kOption, "hold.number", {"is 0"},
              [](v1::Chunk& chunk) {
                chunk.mutable_hold()->set_hidden_states(true);
                chunk.clear_hidden_states();
              }),
      Content("held_hidden_states_with_bad_labels", RejectReason::kLength, "labels", {"holds 1 bytes"},
              [](v1::Chunk& chunk) {
                chunk.mutable_hold()->set_number(1);
                chunk.mutable_hold()->set_hidden_states(true);
                chunk.clear_hidden_states();
                chunk.set_labels("x");
              }),
      Lists("kept_offsets_too_few", RejectReason::kLength, ".offsets", {"holds 128 bytes", "are 136"},
            [](Offsets& offsets, Ids&) { offsets.pop_back(); }),
      Content("kept_ids_of_half_a_token", RejectReason::kLength, "token_inputs.kept_tokens.ids",
              {"holds 127 bytes", "multiple of 4"},
              [](v1::Chunk& chunk) {
                Keep(chunk);
                chunk.mutable_token_inputs()->mutable_kept_tokens()->mutable_ids()->resize(127);
              }),
      Lists("kept_offsets_not_from_0", RejectReason::kOption, ".offsets", {"[0] is 1", "must be 0"},
            [](Offsets& offsets, Ids&) { offsets[0] = 1; }),
      Lists("kept_offsets_that_fall", RejectReason::kOption, ".offsets", {"[4] is 5", "at least 6"},
            [](Offsets& offsets, Ids&) { offsets[4] = 5; }),
      Lists("kept_offsets_below_0", RejectReason::kOption, ".offsets", {"[1] is -9", "at least 0"},
            [](Offsets& offsets, Ids&) { offsets[1] = -9; }),
      Lists("kept_ids_missing", RejectReason::kLength, ".ids", {"holds 31 ids", "[16] is 32"},
            [](Offsets&, Ids& ids) { ids.pop_back(); }),
      Lists("kept_ids_left_over", RejectReason::kLength, ".ids", {"holds 33 ids", "[16] is 32"},
            [](Offsets&, Ids& ids) { ids.push_back(1); }),
      Lists("kept_offsets_beyond_everything", RejectReason::kLength, ".ids", {"holds 32 ids"},
            [](Offsets& offsets, Ids&) { offsets.back() = std::numeric_limits<int64_t>::max(); }),
      Lists("kept_list_empty", RejectReason::kLabel, ".offsets", {"[3] and [4] are 6", "list of token 3"},
            [](Offsets& offsets, Ids& ids) {
              ids.erase(ids.begin() + 6, ids.begin() + 8);
              for (size_t i = 4; i < offsets.size(); ++i) offsets[i] -= 2;
            }),
      Lists("kept_id_twice", RejectReason::kLabel, ".ids", {"ids[11] is", "list of token 5 has already"},
            [](Offsets&, Ids& ids) { ids[11] = ids[10]; }),
      Lists("kept_id_too_large", RejectReason::kLabel, ".ids", {"ids[7] is 64", "[0, 64)"},
            [](Offsets&, Ids& ids) { ids[7] = kInputVocab; }),
      Lists("kept_id_negative", RejectReason::kLabel, ".ids", {"ids[0] is -1", "[0, 64)"},
            [](Offsets&, Ids& ids) { ids[0] = -1; }),
      Lists("label_outside_of_its_list", RejectReason::kLabel, "", {"labels[2] is", "2 ids"},
            [](Offsets&, Ids& ids) { ids[4] = (ids[5] + 1) % kInputVocab; }),
      Content("kept_tokens_and_label_smoothing", RejectReason::kOption, "options.label_smoothing",
              {"is 0.5", "token_inputs.kept_tokens"},
              [](v1::Chunk& chunk) {
                Keep(chunk);
                chunk.mutable_options()->set_label_smoothing(0.5F);
              }),
      Content("kept_tokens_and_soft_targets", RejectReason::kOption, "options.distillation",
              {"is set", "token_inputs.kept_tokens"},
              [](v1::Chunk& chunk) {
                Keep(chunk);
                Teach(chunk);
              }),
      Content("kept_tokens_and_top_k", RejectReason::kOption, "options.returns.top_k",
              {"is 2", "token_inputs.kept_tokens"},
              [](v1::Chunk& chunk) {
                Keep(chunk);
                chunk.mutable_options()->mutable_returns()->set_top_k(2);
              }),
      Targets("target_probabilities_too_few", RejectReason::kLength, ".probabilities",
              {"holds 124 bytes", "are 128"},
              [](v1::TargetLists& targets) { targets.mutable_probabilities()->resize(124); }),
      Targets("target_probabilities_missing", RejectReason::kLength, ".probabilities",
              {"holds 0 bytes", "are 128"}, [](v1::TargetLists& targets) { targets.clear_probabilities(); }),
      Targets("target_probability_negative", RejectReason::kOption, ".probabilities",
              {"[5] is -0.25", "at least 0"},
              [](v1::TargetLists& targets) { SetProbability(targets, 5, -0.25F); }),
      Targets("target_probability_nan", RejectReason::kOption, ".probabilities", {"[5] is nan", "finite"},
              [](v1::TargetLists& targets) {
                SetProbability(targets, 5, std::numeric_limits<float>::quiet_NaN());
              }),
      Targets("target_probability_infinite", RejectReason::kOption, ".probabilities", {"[0] is inf"},
              [](v1::TargetLists& targets) {
                SetProbability(targets, 0, std::numeric_limits<float>::infinity());
              }),
      Targets("target_probabilities_above_1", RejectReason::kOption, ".probabilities",
              {"of token 3 add up to 1.02", "1 at most"},
              [](v1::TargetLists& targets) { SetProbability(targets, 7, 0.27F); }),
      Targets("target_id_twice", RejectReason::kLabel, ".lists.ids", {"ids[3] is", "token 1 has already"},
              [](v1::TargetLists& targets) {
                SetId(targets, 2, 9);
                SetId(targets, 3, 9);
              }),
      Targets("target_id_too_large", RejectReason::kLabel, ".lists.ids", {"ids[7] is 64", "[0, 64)"},
              [](v1::TargetLists& targets) { SetId(targets, 7, kInputVocab); }),
      Targets("target_id_negative", RejectReason::kLabel, ".lists.ids", {"ids[7] is -1", "[0, 64)"},
              [](v1::TargetLists& targets) { SetId(targets, 7, -1); }),
      Targets("target_offsets_missing", RejectReason::kLength, ".lists.offsets", {"holds 0 bytes", "are 136"},
              [](v1::TargetLists& targets) { targets.clear_lists(); }),
      Targets("target_list_empty", RejectReason::kLabel, ".lists.offsets",
              {"[0] and [1] are 0", "list of token 0 is empty"},
              [](v1::TargetLists& targets) {
                const int64_t zero = 0;
                std::memcpy(targets.mutable_lists()->mutable_offsets()->data() + 8, &zero, 8);
              }),
      Targets("target_weight_negative", RejectReason::kOption, ".weight", {"is -1", "at least 0"},
              [](v1::TargetLists& targets) { targets.set_weight(-1); }),
      Targets(
          "target_weight_of_labels_infinite", RejectReason::kOption, ".label_weight", {"is inf", "finite"},
          [](v1::TargetLists& targets) { targets.set_label_weight(std::numeric_limits<float>::infinity()); }),
      Content("targets_and_kept_tokens", RejectReason::kOption, "token_inputs.kept_tokens",
              {"is set", "token_inputs.target_lists"},
              [](v1::Chunk& chunk) {
                Target(chunk);
                Keep(chunk);
              }),
      Content("targets_and_label_smoothing", RejectReason::kOption, "options.label_smoothing",
              {"is 0.5", "token_inputs.target_lists"},
              [](v1::Chunk& chunk) {
                Target(chunk);
                chunk.mutable_options()->set_label_smoothing(0.5F);
              }),
      Content("targets_and_a_teacher", RejectReason::kOption, "options.distillation",
              {"is set", "token_inputs.target_lists"},
              [](v1::Chunk& chunk) {
                Target(chunk);
                Teach(chunk);
              }),
      Content("divergences_without_a_teacher", RejectReason::kOption, "options.returns.divergences",
              {"is true", "neither options.distillation nor token_inputs.target_lists is set"},
              [](v1::Chunk& chunk) { chunk.mutable_options()->mutable_returns()->set_divergences(true); }),
      Content("teacher_hidden_states_without_a_teacher", RejectReason::kLength, "teacher_hidden_states",
              {"holds 4 bytes", "options.distillation is not set"},
              [](v1::Chunk& chunk) { chunk.set_teacher_hidden_states("1234"); }),
      WithCode(Content("unknown_teacher", RejectReason::kUnknownHead, "options.distillation.teacher",
                       {"head 'nobody' does not exist"},
                       [](v1::Chunk& chunk) { Teach(chunk).set_teacher("nobody"); }),
               grpc::StatusCode::NOT_FOUND),
      Content("teacher_hidden_states_too_short", RejectReason::kLength, "teacher_hidden_states",
              {"508", "[16, 8]", "512"},
              [](v1::Chunk& chunk) {
                Teach(chunk);
                chunk.mutable_teacher_hidden_states()->resize(508);
              }),
      Content("nan_for_the_teacher", RejectReason::kNonFinite, "teacher_hidden_states",
              {"1 non-finite", "128"},
              [](v1::Chunk& chunk) {
                Teach(chunk);
                chunk.mutable_teacher_hidden_states()->replace(40, 4, "\xff\xff\xff\xff");
              }),
      Content("teacher_over_the_limit", RejectReason::kChunkTooLarge, "teacher_hidden_states",
              {"are 2080", "teacher_hidden_states 2080", "4096 for both"},
              [](v1::Chunk& chunk) {
                chunk = MakeChunk(chunk.sequence(), 1, 65, kInputVocab, kInputHidden, 5);
                Teach(chunk);
              }),
      Content("teachers_dtype_not_given", RejectReason::kDtype, "options.distillation.hidden_dtype", {"is 0"},
              [](v1::Chunk& chunk) { Teach(chunk).clear_hidden_dtype(); }),
      Content("divergence_not_given", RejectReason::kOption, "options.distillation.divergence",
              {"is 0", "DIVERGENCE_FORWARD_KL (1)"},
              [](v1::Chunk& chunk) { Teach(chunk).clear_divergence(); }),
      Content("beta_of_zero", RejectReason::kOption, "options.distillation.beta",
              {"is 0", "above 0 and below 1"},
              [](v1::Chunk& chunk) { Teach(chunk).set_divergence(v1::DIVERGENCE_JENSEN_SHANNON); }),
      Content("negative_temperature", RejectReason::kOption, "options.distillation.temperature",
              {"is -1", "above 0"}, [](v1::Chunk& chunk) { Teach(chunk).set_temperature(-1); }),
      Content("negative_weight_of_soft_targets", RejectReason::kOption, "options.distillation.weight",
              {"is -2", "at least 0"}, [](v1::Chunk& chunk) { Teach(chunk).set_weight(-2); }),
      Content(
          "nan_weight_of_labels", RejectReason::kOption, "options.distillation.label_weight", {"is nan"},
          [](v1::Chunk& chunk) { Teach(chunk).set_label_weight(std::numeric_limits<float>::quiet_NaN()); }),
      WithCode(Content("other_weights_demanded", RejectReason::kWeightVersion, "options.weight_version",
                       {"is 0", "of version 1"},
                       [](v1::Chunk& chunk) { chunk.mutable_options()->set_weight_version(0); }),
               grpc::StatusCode::FAILED_PRECONDITION),
  };
}

}  // namespace lossd::testing
