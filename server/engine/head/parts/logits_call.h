// One call for logits on its way through a head: what is wanted of which rows, whether that can be, and what
// comes of it.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_LOGITS_CALL_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_LOGITS_CALL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/data_type.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {

struct LogitsRequest {
  int64_t rows = 0;
  kernels::DataType hidden_type = kernels::DataType::kFloat32;
  kernels::DataType logits_type = kernels::DataType::kFloat32;
  // Where these are not set, the head's count.
  std::optional<float> logit_scale = {};
  std::optional<float> softcap = {};
  std::optional<Bias> bias = {};
  std::optional<uint64_t> weight_version = {};  // that the weights must have
  int32_t top_k = 0;                            // above 0: of each row only so many, and its log-sum-exp
  std::string hidden_states;                    // [rows, H] of hidden_type, little-endian
  // Returns whether nobody waits for the answer any more. Any thread calls it before it computes. May be
  // empty.
  std::function<bool()> cancelled = {};
};

struct LogitsAnswer {
  uint64_t weight_version = 0;
  uint64_t restores = 0;    // of the head, by the time it had these weights
  ResultBytes logits;       // [rows, V] of logits_type; empty with top_k
  std::string top_tokens;   // int32 [rows, top_k]; this and the next two empty without
  std::string top_logits;   // fp32 [rows, top_k]
  std::string log_sum_exp;  // fp32 [rows]
  // Keep it as long as the rest: it holds the answer's part of the bytes that calls of the head may hold
  // together.
  std::shared_ptr<const void> room = {};
};
using LogitsCallback = std::function<void(absl::StatusOr<LogitsAnswer>)>;

// A call that waits for the device.
struct LogitsCall {
  LogitsRequest request;
  LogitsAnswer answer;
  int64_t rows_done = 0;
  int32_t restarts = 0;  // because the weights were replaced meanwhile
  LogitsCallback done;
  absl::Time taken;
};

// Most bytes of the hidden states of one call, and of its answer. A call of a single row may have more.
int64_t MostLogitsBytes(const ChunkLimits& limits);

// Bytes that a call holds: of its rows in whichever type is wider, and of its answer.
int64_t LogitsBytes(const LogitsRequest& request, const HeadConfig& head);

// Sizes, options, finiteness of the hidden states. INVALID_ARGUMENT naming the field, what it is and what it
// must be.
absl::Status ValidateLogits(const LogitsRequest& request, const HeadConfig& head, const ChunkLimits& limits);

// Makes the memory of an answer, which may be kept for long: not the device's.
void MakeRoom(const LogitsRequest& request, const HeadConfig& head, LogitsAnswer* answer);

// Some rows of a call where the device wants them, for as long as it computes.
class LogitsTile {
 public:
  LogitsTile(const LogitsRequest& request, const HeadConfig& head, int64_t first, int64_t rows,
             Device* device, LogitsAnswer* answer);
  const LogitRows& rows() const { return rows_; }
  // Copies the results into the answer. To be called once they are computed.
  void TakeResults();

 private:
  ResultBytes operand_;                // [rows, H] of the head's weight_type
  std::optional<ResultBytes> staged_;  // logits on their way to the answer, if they take one
  std::byte* logits_ = nullptr;        // theirs there
  LogitRows rows_;
};

// Bytes that calls hold together, each from when it is taken until its answer is dropped. Thread-safe.
class LogitsRoom {
 public:
  // Null if the calls would hold more than `limit` together; a call that is alone is never refused.
  std::shared_ptr<const void> Take(int64_t bytes, int64_t limit);
  int64_t taken() const { return *taken_; }

 private:
  const std::shared_ptr<std::atomic<int64_t>> taken_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_LOGITS_CALL_H_
