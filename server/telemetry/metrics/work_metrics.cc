// Chunks, tokens, batches and logits.
#include "server/engine/common/errors.h"
#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kChunks{
    "lossd_chunks_total", "Chunks read from streams, by what became of them.", kCounter, {"outcome"}};
constexpr Metric kTokens{"lossd_tokens_total", "Tokens of chunks that were computed.", kCounter, {"kind"}};
constexpr Metric kPayloadBytes{
    "lossd_payload_bytes_total", "Tensor bytes of chunks and their answers.", kCounter, {"direction"}};
constexpr Metric kRejected{
    "lossd_rejected_total", "Chunks and calls that were refused, by reason.", kCounter, {"reason"}};
constexpr Metric kRowsRedone{"lossd_rows_redone_total",
                             "Rows computed again because their exponent offset was out of range.", kCounter};
constexpr Metric kRowsSkipped{"lossd_rows_skipped_total",
                              "Valid tokens that nothing was computed of: all their factors are 0.",
                              kCounter};
constexpr Metric kHeldRows{"lossd_held_rows_total",
                           "Rows of batches in two phases that are to be held, by what became of them.",
                           kCounter,
                           {"outcome"}};
constexpr Metric kHeldHidden{"lossd_held_hidden_states_total",
                             "Tokens of chunks whose hidden states are to be held, or are to be those that "
                             "are, by what became of them.",
                             kCounter,
                             {"outcome"}};
constexpr Metric kNonFinite{"lossd_non_finite_total",
                            "What was not finite: chunks rejected for their hidden_states, losses of tokens, "
                            "elements of a gradient that somebody looked at.",
                            kCounter,
                            {"kind"}};
constexpr Metric kBatchChunks{"lossd_batch_chunks",
                              "Chunks gathered into each batch that was started on the device.", kHistogram};
constexpr Metric kBatchRows{"lossd_batch_rows", "Tokens of each batch that was started on the device.",
                            kHistogram};
constexpr Metric kKeptTokens{
    "lossd_kept_tokens", "Tokens in the list of each valid token whose softmax is over a list.", kHistogram};
constexpr Metric kTargetTokens{"lossd_target_tokens",
                               "Tokens in the list of soft targets of each valid token that has one.",
                               kHistogram};
constexpr Metric kChunkSeconds{
    "lossd_chunk_seconds",
    "Time of chunks by stage: read (until accepted), queue (accepted until started), forward (until loss and "
    "dX), weight_gradient (until dW), answer (loss and dX until they are on the wire).",
    kHistogram,
    {"stage"}};
constexpr Metric kLogitsCalls{"lossd_logits_calls_total", "Calls for logits that were answered.", kCounter};
constexpr Metric kLogitsRows{"lossd_logits_rows_total", "Rows of these calls.", kCounter};
constexpr Metric kLogitsSeconds{"lossd_logits_seconds",
                                "Time from a call for logits until they are computed.", kHistogram};

}  // namespace

void CollectWork(const engine::Engine& engine, Exposition& out) {
  const engine::Counters& counters = engine.counters();
  out.Begin(kChunks);
  out.Add({"accumulated"}, counters.chunks_accumulated);
  out.Add({"input_gradient"}, counters.chunks_input_gradient);
  out.Add({"loss_only"}, counters.chunks_loss_only);
  out.Add({"repeated"}, counters.chunks_repeated);
  out.Add({"rejected"}, counters.chunks_rejected);
  out.Add({"refused"}, counters.chunks_refused);
  out.Add({"withdrawn"}, counters.chunks_withdrawn);
  out.Begin(kTokens);
  out.Add({"valid"}, counters.tokens_valid);
  out.Add({"ignored"}, counters.tokens_ignored);
  out.Begin(kPayloadBytes);
  out.Add({"in"}, counters.payload_bytes_in);
  out.Add({"out"}, counters.payload_bytes_out);
  out.Begin(kRejected);
  for (int i = 0; i < engine::kRejectReasonCount; ++i) {
    out.Add({engine::Name(static_cast<engine::RejectReason>(i))}, counters.rejected[static_cast<size_t>(i)]);
  }
  out.Only(kRowsRedone, counters.rows_redone);
  out.Only(kRowsSkipped, counters.rows_skipped);
  out.Begin(kHeldRows);
  out.Add({"held"}, counters.rows_held);
  out.Add({"taken"}, counters.rows_taken);
  out.Add({"recomputed"}, counters.rows_recomputed);
  out.Begin(kHeldHidden);
  out.Add({"held"}, counters.hidden_states_held);
  out.Add({"not_held"}, counters.hidden_states_not_held);
  out.Add({"taken"}, counters.hidden_states_taken);
  out.Add({"gone"}, counters.hidden_states_gone);
  out.Begin(kNonFinite);
  out.Add({"hidden_states"}, counters.non_finite_hidden_states);
  out.Add({"loss"}, counters.non_finite_losses);
  out.Add({"gradient"}, counters.non_finite_gradients);
  out.Only(kBatchChunks, counters.batch_chunks);
  out.Only(kBatchRows, counters.batch_rows);
  out.Only(kKeptTokens, counters.kept_tokens);
  out.Only(kTargetTokens, counters.target_tokens);
  out.Begin(kChunkSeconds);
  out.Add({"read"}, counters.read_seconds);
  out.Add({"queue"}, counters.queue_seconds);
  out.Add({"forward"}, counters.forward_seconds);
  out.Add({"weight_gradient"}, counters.weight_gradient_seconds);
  out.Add({"answer"}, counters.answer_seconds);
  out.Only(kLogitsCalls, counters.logits_calls);
  out.Only(kLogitsRows, counters.logits_rows);
  out.Only(kLogitsSeconds, counters.logits_seconds);
}

}  // namespace lossd::telemetry
