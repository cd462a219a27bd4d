#include "server/engine/head/parts/staged_write.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
StagedWrite::StagedWrite(std::string id, std::string key, HeadConfig config, WeightBuffers buffers)
    : id_(std::move(id)),
      key_(std::move(key)),
      config_(std::move(config)),
      buffers_(std::move(buffers)),
      present_(static_cast<size_t>(config_.vocab_size), false),
      missing_(config_.vocab_size) {}

absl::Status StagedWrite::CheckBias(int64_t first_row, int64_t rows, absl::string_view bias) const {
  const int64_t bytes = config_.bias ? rows * static_cast<int64_t>(sizeof(float)) : 0;
  if (static_cast<int64_t>(bias.size()) != bytes) {
    const std::string wanted =
        config_.bias ? absl::StrCat(rows, " fp32 values are ", bytes) : "the head was created without a bias";
    return Invalid(RejectReason::kLength, "bias",
                   absl::StrCat("bias holds ", bias.size(), " bytes; ", wanted));
  }
  for (size_t i = 0; i < bias.size() / sizeof(float); ++i) {
    float value = 0;
    std::memcpy(&value, bias.data() + i * sizeof(float), sizeof(float));
    if (std::isfinite(value)) continue;
    return Invalid(
        RejectReason::kNonFinite, "bias",
        absl::StrCat("bias[", first_row + static_cast<int64_t>(i), "] is ", value, "; it must be finite"));
  }
  return absl::OkStatus();
}

absl::Status StagedWrite::Write(int64_t first_row, int64_t rows, kernels::DataType type,
                                absl::string_view data, absl::string_view bias) {
  const int64_t vocab = config_.vocab_size;
  if (first_row < 0 || first_row >= vocab) {
    return Invalid(RejectReason::kShape, "first_row",
                   absl::StrCat("first_row is ", first_row, "; the head has ", vocab, " rows"));
  }
  if (rows < 1 || rows > vocab - first_row) {
    return Invalid(
        RejectReason::kShape, "rows",
        absl::StrCat("rows is ", rows, "; from first_row ", first_row, " on there are ", vocab - first_row));
  }
  const int64_t bytes = rows * config_.hidden_size * kernels::SizeOf(type);
  if (static_cast<int64_t>(data.size()) != bytes) {
    return Invalid(RejectReason::kLength, "weights",
                   absl::StrCat("weights holds ", data.size(), " bytes; [", rows, ", ", config_.hidden_size,
                                "] of ", kernels::Name(type), " are ", bytes));
  }
  if (absl::Status status = CheckBias(first_row, rows, bias); !status.ok()) return status;
  const MutexLock lock(mutex_);
  if (absl::Status there = CheckThereLocked(); !there.ok()) return there;
  if (!bias.empty()) {
    std::memcpy(buffers_.bias.data() + first_row * static_cast<int64_t>(sizeof(float)), bias.data(),
                bias.size());
  }
  const int64_t source_bytes = config_.hidden_size * kernels::SizeOf(type);
  for (int64_t row = first_row; row < first_row + rows; ++row) {
    const absl::Status copied = CopyRowLocked(row, type, data.data() + (row - first_row) * source_bytes);
    // A refused row is missing, even if an earlier call had brought it. The rows before it are there.
    MarkLocked(row, copied.ok());
    if (!copied.ok()) return copied;
  }
  return absl::OkStatus();
}

absl::Status StagedWrite::CopyRowLocked(int64_t row, kernels::DataType type, const char* from) {
  const kernels::DataType kept = config_.master_type();
  const kernels::DataType used = config_.weight_type;
  const int64_t columns = config_.hidden_size;
  std::byte* to = buffers_.weights.data() + row * columns * kernels::SizeOf(kept);
  kernels::Convert(type, from, kept, to, columns);
  // A value that is too large for the head's type is infinite in it.
  const std::byte* checked = to;
  if (used != kept) {
    narrow_.resize(static_cast<size_t>(columns * kernels::SizeOf(used)));
    kernels::Convert(kept, to, used, narrow_.data(), columns);
    checked = narrow_.data();
  }
  if (kernels::CountNonFinite(used, checked, columns) == 0) return absl::OkStatus();
  int64_t column = 0;
  while (kernels::CountNonFinite(used, checked + column * kernels::SizeOf(used), 1) == 0) ++column;
  float value = 0;
  kernels::Convert(type, from + column * kernels::SizeOf(type), kernels::DataType::kFloat32, &value, 1);
  // Clients narrow before they send, so that an infinite value may have been finite.
  const bool overflows = used != kernels::DataType::kFloat32 &&
                         (std::isfinite(value) || (std::isinf(value) && type != kernels::DataType::kFloat32));
  const absl::string_view larger = used == kernels::DataType::kFloat16 ? "bfloat16 or float32" : "float32";
  return Invalid(
      RejectReason::kNonFinite, "weights",
      absl::StrCat("weights[", row, ", ", column, "] is ", value, "; it must be finite in ",
                   kernels::Name(used),
                   overflows ? absl::StrCat(": give the head a type with a larger range, ", larger) : ""));
}

void StagedWrite::MarkLocked(int64_t row, bool is_there) {
  auto&& mark = present_[static_cast<size_t>(row)];
  missing_ += static_cast<int64_t>(mark) - static_cast<int64_t>(is_there);
  mark = is_there;
}

absl::Status StagedWrite::CheckThereLocked() const {
  if (!taken_) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kWeightWrite, "write_id",
      absl::StrCat("write ", id_, " was committed, replaced, or undone by a restore; begin a new one"));
}

absl::StatusOr<StagedWrite::Rows> StagedWrite::Read(int64_t first_row, int64_t rows) const {
  const int64_t row_bytes = config_.hidden_size * kernels::SizeOf(config_.master_type());
  const auto bias_bytes = static_cast<int64_t>(sizeof(float));
  const MutexLock lock(mutex_);
  if (absl::Status there = CheckThereLocked(); !there.ok()) return there;
  Rows read;
  read.weights.assign(reinterpret_cast<const char*>(buffers_.weights.data()) + first_row * row_bytes,
                      static_cast<size_t>(rows * row_bytes));
  if (config_.bias) {
    read.bias.assign(reinterpret_cast<const char*>(buffers_.bias.data()) + first_row * bias_bytes,
                     static_cast<size_t>(rows * bias_bytes));
  }
  return read;
}

int64_t StagedWrite::rows() const {
  const MutexLock lock(mutex_);
  return config_.vocab_size - missing_;
}

absl::Status StagedWrite::CheckComplete() const {
  const MutexLock lock(mutex_);
  if (missing_ == 0) return absl::OkStatus();
  const auto first = std::find(present_.begin(), present_.end(), false) - present_.begin();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kWeightWrite, "write_id",
                   absl::StrCat("write ", id_, " lacks ", missing_, " of ", config_.vocab_size,
                                " rows, the first is row ", first));
}

WeightBuffers StagedWrite::Take() {
  const MutexLock lock(mutex_);
  taken_ = true;
  return std::move(buffers_);
}

}  // namespace lossd::engine
