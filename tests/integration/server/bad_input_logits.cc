#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/server/bad_input.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;

std::string Zeros(int64_t rows) { return std::string(static_cast<size_t>(rows * kInputHidden * 4), '\0'); }

// Three rows that could be computed, but for what is done to them.
std::function<Outcome(Environment&)> Asking(std::function<void(v1::LogitsRequest&)> spoil) {
  return [spoil = std::move(spoil)](Environment& environment) {
    v1::LogitsRequest request;
    request.set_head("h");
    request.set_rows(3);
    request.set_hidden_dtype(v1::DATA_TYPE_FLOAT32);
    request.set_hidden_states(Zeros(3));
    spoil(request);
    return Call(*environment.stubs().losses, &v1::LossService::Stub::Logits, request);
  };
}

Outcome WithoutWeights(Environment& environment) {
  v1::CreateHeadRequest create;
  create.mutable_config()->set_name("bare");
  create.mutable_config()->set_vocab_size(kInputVocab);
  create.mutable_config()->set_hidden_size(kInputHidden);
  create.mutable_config()->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
  Call(*environment.stubs().heads, &v1::HeadService::Stub::CreateHead, create);
  return Asking([](v1::LogitsRequest& request) { request.set_head("bare"); })(environment);
}

void SetFirst(v1::LogitsRequest& request, float value) {
  std::memcpy(request.mutable_hidden_states()->data(), &value, sizeof(value));
}

}  // namespace

std::vector<Case> LogitsCases() {
  constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  return {
      {"logits_of_an_unknown_head",
       Asking([](auto& request) { request.set_head("nowhere"); }),
       grpc::StatusCode::NOT_FOUND,
       {"'nowhere'"},
       RejectReason::kUnknownHead},
      {"logits_without_weights",
       WithoutWeights,
       grpc::StatusCode::FAILED_PRECONDITION,
       {"bare", "no weights"},
       RejectReason::kNoWeights},
      {"logits_of_no_rows",
       Asking([](auto& request) { request.set_rows(0); }),
       kInvalid,
       {"rows is 0"},
       RejectReason::kNoTokens},
      {"logits_of_a_negative_number_of_rows",
       Asking([](auto& request) { request.set_rows(std::numeric_limits<int64_t>::min()); }),
       kInvalid,
       {"rows is -9223372036854775808"},
       RejectReason::kNoTokens},
      {"logits_of_too_many_rows",
       Asking([](auto& request) {
         request.set_rows(17);
         request.set_hidden_states(Zeros(17));
       }),
       kInvalid,
       {"rows is 17", "the most of one call is 16", "4096", "top_k"},
       RejectReason::kChunkTooLarge},
      {"logits_of_rows_that_overflow",
       Asking([](auto& request) { request.set_rows(std::numeric_limits<int64_t>::max()); }),
       kInvalid,
       {"9223372036854775807", "16"},
       RejectReason::kChunkTooLarge},
      {"largest_logits_of_too_many_rows",
       Asking([](auto& request) {
         request.set_rows(129);
         request.set_top_k(1);
       }),
       kInvalid,
       {"rows is 129", "the most of one call is 128"},
       RejectReason::kChunkTooLarge},
      {"logits_of_hidden_states_that_are_too_short",
       Asking([](auto& request) { request.mutable_hidden_states()->pop_back(); }),
       kInvalid,
       {"hidden_states holds 95 bytes", "are 96"},
       RejectReason::kLength},
      {"logits_of_no_hidden_states",
       Asking([](auto& request) { request.clear_hidden_states(); }),
       kInvalid,
       {"hidden_states holds 0 bytes"},
       RejectReason::kLength},
      {"logits_of_nan",
       Asking([=](auto& request) { SetFirst(request, nan); }),
       kInvalid,
       {"1 non-finite values of 24"},
       RejectReason::kNonFinite},
      {"logits_of_infinity",
       Asking([=](auto& request) { SetFirst(request, -inf); }),
       kInvalid,
       {"1 non-finite values of 24"},
       RejectReason::kNonFinite},
      {"logits_of_no_type",
       Asking([](auto& request) { request.clear_hidden_dtype(); }),
       kInvalid,
       {"hidden_dtype is 0"},
       RejectReason::kDtype},
      {"logits_of_an_unknown_type",
       Asking([](auto& request) { request.set_logits_dtype(static_cast<v1::DataType>(9)); }),
       kInvalid,
       {"logits_dtype is 9", "field 4 of lossd.v1.LogitsRequest"},
       RejectReason::kUnknownField},
      {"logits_with_a_negative_scale",
       Asking([](auto& request) { request.set_logit_scale(-1); }),
       kInvalid,
       {"logit_scale is -1"},
       RejectReason::kOption},
      {"logits_with_an_infinite_softcap",
       Asking([=](auto& request) { request.set_softcap(inf); }),
       kInvalid,
       {"softcap is inf"},
       RejectReason::kOption},
      {"logits_with_a_bias_that_is_not_there",
       Asking([](auto& request) { request.set_bias(true); }),
       kInvalid,
       {"bias is true", "without a bias"},
       RejectReason::kOption},
      {"more_of_the_largest_logits_than_can_be_told",
       Asking([](auto& request) { request.set_top_k(65); }),
       kInvalid,
       {"top_k is 65", "[0, 64]"},
       RejectReason::kOption},
      {"largest_logits_in_half_precision",
       Asking([](auto& request) {
         request.set_top_k(1);
         request.set_logits_dtype(v1::DATA_TYPE_FLOAT16);
       }),
       kInvalid,
       {"with top_k logits are float32"},
       RejectReason::kDtype},
      {"logits_of_another_weight_version",
       Asking([](auto& request) { request.set_weight_version(7); }),
       grpc::StatusCode::FAILED_PRECONDITION,
       {"weight_version is 7", "version 1"},
       RejectReason::kWeightVersion},
      {"logits_of_weight_version_0",
       Asking([](auto& request) { request.set_weight_version(0); }),
       grpc::StatusCode::FAILED_PRECONDITION,
       {"weight_version is 0", "version 1"},
       RejectReason::kWeightVersion},
      {"logits_after_their_deadline",
       [](Environment& environment) {
         v1::LogitsRequest request;
         request.set_head("h");
         grpc::ClientContext context;
         context.set_deadline(std::chrono::system_clock::now() - std::chrono::seconds(1));
         v1::LogitsResponse response;
         return FromStatus(environment.stubs().losses->Logits(&context, request, &response));
       },
       grpc::StatusCode::DEADLINE_EXCEEDED,
       {},
       std::nullopt},
  };
}

}  // namespace lossd::testing
