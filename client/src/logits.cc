// Head::Logits: rows in as few calls as the server's limit lets them be, all of the same weights.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/common/convert.h"
#include "client/src/common/head_impl.h"
#include "lossd/client.h"

namespace lossd {
namespace {

constexpr int64_t kMostTopK = 64;   // the server's limit
constexpr int64_t kValueBytes = 4;  // of a token, and of a logit in fp32
// Bytes of hidden states, and of the answer, in one call, whatever the server would take: there is a copy of
// both beside the caller's memory.
constexpr int64_t kMostCallBytes = int64_t{32} << 20;
constexpr int kMostRestarts = 8;

absl::Status CheckRoom(size_t room, int64_t values, const char* name) {
  if (room == 0 || static_cast<int64_t>(room) == values) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has room for ", room, " values; it must have ", values, ", or none"));
}

absl::Status Check(const HeadConfig& head, const LogitsBatch& batch, const LogitsOutputs& out) {
  if (batch.rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("rows is ", batch.rows, "; it must be at least 0"));
  }
  if (batch.rows > 0 && batch.hidden_states == nullptr) {
    return absl::InvalidArgumentError("hidden_states is null");
  }
  const int64_t most = std::min(kMostTopK, head.vocab_size);
  if (out.top_k < 0 || out.top_k > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", out.top_k, "; it must be in [0, ", most, "]"));
  }
  if (out.top_k > 0 && out.logits != nullptr) {
    return absl::InvalidArgumentError("logits and top_k are both set; ask for one of them");
  }
  if (out.top_k == 0 && out.logits == nullptr && batch.rows > 0) {
    return absl::InvalidArgumentError("logits is null and top_k is 0; one of them must be set");
  }
  int64_t top = 0;
  if (__builtin_mul_overflow(batch.rows, int64_t{out.top_k}, &top)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows is ", batch.rows, " and top_k ", out.top_k, ": no array has as many elements"));
  }
  absl::Status status = CheckRoom(out.top_tokens.size(), top, "top_tokens");
  status.Update(CheckRoom(out.top_logits.size(), top, "top_logits"));
  status.Update(CheckRoom(out.log_sum_exp.size(), out.top_k > 0 ? batch.rows : 0, "log_sum_exp"));
  return status;
}

class LogitsReader {
 public:
  LogitsReader(internal::HeadContext& head, const LogitsBatch& batch, const LogitsOutputs& out)
      : head_(head),
        batch_(batch),
        out_(out),
        hidden_row_bytes_(head.config().hidden_size * SizeOf(batch.hidden_type)),
        logits_row_bytes_(out.top_k > 0 ? 0 : head.config().vocab_size * SizeOf(out.type)) {
    if (batch.weight_version > 0) request_.set_weight_version(batch.weight_version);
    request_.set_head(head.config().name);
    request_.set_hidden_dtype(internal::ToProto(batch.hidden_type));
    request_.set_logits_dtype(internal::ToProto(out.top_k > 0 ? DataType::kFloat32 : out.type));
    request_.set_top_k(out.top_k);
    if (batch.logit_scale.has_value()) request_.set_logit_scale(*batch.logit_scale);
    if (batch.softcap.has_value()) request_.set_softcap(*batch.softcap);
    if (batch.bias != Bias::kOfHead) request_.set_bias(batch.bias == Bias::kUse);
  }

  // From the start again if the weights change meanwhile, a few times.
  absl::StatusOr<uint64_t> Read() {
    for (int restarts = 0;; ++restarts) {
      if (batch_.weight_version == 0) request_.clear_weight_version();
      absl::StatusOr<uint64_t> version = ReadOnce();
      const bool replaced = absl::IsFailedPrecondition(version.status()) && first_.weight_version() != 0 &&
                            batch_.weight_version == 0;
      const bool changed = replaced || absl::IsAborted(version.status());
      if (!changed || restarts == kMostRestarts) return version;
    }
  }

 private:
  absl::StatusOr<uint64_t> ReadOnce() {
    first_.Clear();
    const int64_t most = RowsPerCall();
    for (int64_t row = 0; row < batch_.rows; row += most) {
      const int64_t rows = std::min(most, batch_.rows - row);
      const char* hidden = static_cast<const char*>(batch_.hidden_states) + row * hidden_row_bytes_;
      request_.set_rows(rows);
      request_.set_hidden_states(hidden, static_cast<size_t>(rows * hidden_row_bytes_));
      const auto answer = head_.connection().Call(&v1::LossService::Stub::AsyncLogits, request_);
      if (!answer.ok()) return answer.status();
      if (row > 0 && !SameWeights(*answer)) {
        return absl::AbortedError(
            absl::StrCat("the server started again, or restored a checkpoint, while logits were read: the "
                         "weights of version ",
                         answer->weight_version(), " may be others"));
      }
      if (absl::Status taken = Take(*answer, row, rows); !taken.ok()) return taken;
      first_.set_weight_version(answer->weight_version());
      first_.set_incarnation(answer->incarnation());
      first_.set_restores(answer->restores());
      request_.set_weight_version(answer->weight_version());
    }
    return first_.weight_version();
  }

  // Whether the weights are those of the first rows. Versions of another server, or from before a restore,
  // are counted anew.
  bool SameWeights(const v1::LogitsResponse& answer) const {
    return answer.weight_version() == first_.weight_version() &&
           answer.incarnation() == first_.incarnation() && answer.restores() == first_.restores();
  }

  int64_t RowsPerCall() const {
    const internal::LogitsLimits& most = head_.most_logits();
    const int64_t limit = std::min(most.bytes, kMostCallBytes);
    const int64_t answer = out_.top_k > 0 ? (2 * int64_t{out_.top_k} + 1) * kValueBytes : logits_row_bytes_;
    const int64_t of_bytes = std::max<int64_t>(1, limit / std::max(hidden_row_bytes_, answer));
    return most.rows > 0 ? std::min(of_bytes, most.rows) : of_bytes;
  }

  absl::Status Take(const v1::LogitsResponse& answer, int64_t row, int64_t rows) const {
    const int64_t top = rows * out_.top_k;
    absl::Status status = Copy(answer.logits(), rows * logits_row_bytes_, "logits",
                               static_cast<char*>(out_.logits) + row * logits_row_bytes_);
    status.Update(Copy(answer.top_tokens(), top * kValueBytes, "top_tokens",
                       out_.top_tokens.empty() ? nullptr : out_.top_tokens.data() + row * out_.top_k));
    status.Update(Copy(answer.top_logits(), top * kValueBytes, "top_logits",
                       out_.top_logits.empty() ? nullptr : out_.top_logits.data() + row * out_.top_k));
    status.Update(Copy(answer.log_sum_exp(), out_.top_k > 0 ? rows * kValueBytes : 0, "log_sum_exp",
                       out_.log_sum_exp.empty() ? nullptr : out_.log_sum_exp.data() + row));
    return status;
  }

  static absl::Status Copy(const std::string& from, int64_t bytes, const char* name, void* to) {
    if (static_cast<int64_t>(from.size()) != bytes) {
      return absl::InternalError(
          absl::StrCat("the server sent ", from.size(), " bytes of ", name, "; expected ", bytes));
    }
    if (bytes > 0 && to != nullptr) std::memcpy(to, from.data(), from.size());
    return absl::OkStatus();
  }

  internal::HeadContext& head_;
  const LogitsBatch& batch_;
  const LogitsOutputs& out_;
  const int64_t hidden_row_bytes_;
  const int64_t logits_row_bytes_;
  v1::LogitsRequest request_;
  v1::LogitsResponse first_;  // whose weights the rows that there are are of; without logits
};

}  // namespace

absl::StatusOr<uint64_t> Head::Logits(const LogitsBatch& batch, const LogitsOutputs& outputs) const {
  if (absl::Status checked = Check(config(), batch, outputs); !checked.ok()) return checked;
  if (batch.rows > 0) return LogitsReader(*impl_->context, batch, outputs).Read();
  const absl::StatusOr<HeadInfo> info = Info();
  if (!info.ok()) return info.status();
  return info->weight_version;
}

}  // namespace lossd
