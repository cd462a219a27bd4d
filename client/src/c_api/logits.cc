// Logits of a few rows.
#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "client/src/c_api/arguments.h"
#include "client/src/c_api/handles.h"
#include "client/src/c_api/output.h"
#include "client/src/c_api/structs.h"

using namespace lossd::c_api;  // NOLINT(google-build-using-namespace): all of this file is about it

namespace {

absl::StatusOr<lossd::LogitsBatch> BatchOf(const lossd_logits& given) {
  static constexpr std::array kBiases = {lossd::Bias::kOfHead, lossd::Bias::kIgnore, lossd::Bias::kUse};
  const auto type = DataTypeOf(given.hidden_dtype, "logits.hidden_dtype");
  if (!type.ok()) return type.status();
  const auto bias = EnumOf(kBiases, given.bias, "logits.bias");
  if (!bias.ok()) return bias.status();
  return lossd::LogitsBatch{.rows = given.rows,
                            .hidden_type = *type,
                            .hidden_states = given.hidden_states,
                            .logit_scale = OptionalOf(given.logit_scale),
                            .softcap = OptionalOf(given.softcap),
                            .bias = *bias,
                            .weight_version = given.weight_version};
}

absl::StatusOr<lossd::LogitsOutputs> OutputsOf(const lossd_logits& given) {
  const auto type = DataTypeOf(given.dtype, "logits.dtype");
  if (!type.ok()) return type.status();
  const int64_t rows = std::max<int64_t>(given.rows, 0);
  const auto top = ElementsOf("logits.rows", rows, "logits.top_k", std::max(given.top_k, 0));
  if (!top.ok()) return top.status();
  return lossd::LogitsOutputs{.type = *type,
                              .logits = given.logits,
                              .top_k = given.top_k,
                              .top_tokens = SpanOf(given.top_tokens, *top),
                              .top_logits = SpanOf(given.top_logits, *top),
                              .log_sum_exp = SpanOf(given.log_sum_exp, given.top_k > 0 ? rows : 0)};
}

}  // namespace

lossd_status* lossd_head_logits(const lossd_head* head, const lossd_logits* logits,
                                uint64_t* weight_version) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    const auto given = Read(logits, "logits");
    if (!given.ok()) return given.status();
    const auto batch = BatchOf(*given);
    if (!batch.ok()) return batch.status();
    const auto outputs = OutputsOf(*given);
    if (!outputs.ok()) return outputs.status();
    return PutVersion(head->head.Logits(*batch, *outputs), weight_version);
  });
}
