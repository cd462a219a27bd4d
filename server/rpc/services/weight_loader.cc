#include "server/rpc/services/weight_loader.h"

#include <algorithm>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/safetensors/safetensors.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/random_id.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {
namespace {

using engine::RejectReason;
using kernels::DataType;
using telemetry::Log;
using telemetry::LogLevel;

constexpr char kWeightTensor[] = "lm_head.weight";
constexpr char kBiasTensor[] = "lm_head.bias";
constexpr int64_t kPieceBytes = int64_t{8} << 20;
constexpr size_t kMostPath = 4096;
constexpr size_t kMostTensorName = 1024;
constexpr absl::Duration kLogInterval = absl::Seconds(5);

absl::Status Error(absl::StatusCode code, absl::string_view field, absl::string_view message) {
  return engine::MakeError(code, RejectReason::kWeightWrite, field, message);
}

// A file's error, which knows nothing of requests, as one of `field`.
absl::Status OfFile(const absl::Status& status, absl::string_view field) {
  return Error(status.code(), field, status.message());
}

absl::Status CheckLength(absl::string_view field, const std::string& value, size_t most) {
  if (value.size() <= most) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, field,
               absl::StrCat(field, " has ", value.size(), " bytes; it may have ", most));
}

DataType ToEngine(SafetensorsType type) {
  switch (type) {
    case SafetensorsType::kFloat32:
      return DataType::kFloat32;
    case SafetensorsType::kBFloat16:
      return DataType::kBFloat16;
    case SafetensorsType::kFloat16:
      return DataType::kFloat16;
  }
  return DataType::kFloat32;
}

std::string Brackets(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// One load of one head.
class Loading {
 public:
  Loading(engine::Engine* engine, const WeightSource& source, const std::function<bool()>& cancelled)
      : engine_(engine), source_(source), cancelled_(cancelled) {}

  absl::Status Open(const std::string& folder) {
    absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHeadAndWait(source_.head);
    if (!head.ok()) return head.status();
    head_ = *std::move(head);
    absl::StatusOr<SafetensorsModel> model = SafetensorsModel::OpenBelow(folder, source_.path);
    if (!model.ok()) return OfFile(model.status(), "path");
    model_.emplace(*std::move(model));
    const engine::HeadConfig& config = head_->config();
    if (absl::Status status = ChooseTensor(); !status.ok()) return status;
    absl::Status status = Find("tensor", tensor_, {config.vocab_size, config.hidden_size}, &weight_);
    if (!status.ok()) return status;
    if (!config.bias && !source_.bias_tensor.empty()) {
      return engine::MakeError(
          absl::StatusCode::kInvalidArgument, engine::RejectReason::kOption, "bias_tensor",
          absl::StrCat("bias_tensor is '", source_.bias_tensor, "'; the head was created without a bias"));
    }
    if (!config.bias) return status;
    const std::string bias = source_.bias_tensor.empty() ? kBiasTensor : source_.bias_tensor;
    return Find("bias_tensor", bias, {config.vocab_size}, &bias_);
  }

  absl::StatusOr<LoadedWeights> Run() {
    // As Head::WriteWeights of the client library: an unfinished write must not be in the way for ever.
    const absl::StatusOr<std::string> id = head_->BeginWrite(absl::StrCat("load ", engine::RandomId()),
                                                             engine::Head::Replace::kYes, engine::RandomId());
    if (!id.ok()) return id.status();
    absl::Status status = Stage(*id);
    if (!status.ok()) {
      head_->DropWrite(*id);
      return OfWrite(status);
    }
    std::promise<absl::StatusOr<uint64_t>> published;
    head_->CommitWrite(
        *id, [&published](absl::StatusOr<uint64_t> version) { published.set_value(std::move(version)); });
    absl::StatusOr<uint64_t> version = published.get_future().get();
    if (!version.ok()) {
      head_->DropWrite(*id);
      return OfWrite(version.status());
    }
    return LoadedWeights{*version, tensor_};
  }

  int64_t bytes() const { return static_cast<int64_t>(weight_.data.size() + bias_.data.size()); }

 private:
  absl::Status ChooseTensor() {
    tensor_ = source_.tensor.empty() ? kWeightTensor : source_.tensor;
    if (!source_.tensor.empty() || model_->Contains(tensor_)) return absl::OkStatus();
    const engine::HeadConfig& config = head_->config();
    const std::vector<int64_t> shape = {config.vocab_size, config.hidden_size};
    const absl::StatusOr<std::vector<std::string>> candidates = model_->FindByShape(shape);
    if (!candidates.ok()) return OfFile(candidates.status(), "path");
    if (candidates->size() == 1) {
      tensor_ = candidates->front();
      return absl::OkStatus();
    }
    const auto cut = [](std::string* out, const std::string& name) { out->append(name, 0, 100); };
    const std::string there =
        candidates->empty() ? absl::StrCat("nor one of ", Brackets(shape), " in F32, BF16 or F16")
                            : absl::StrCat("and several of ", Brackets(shape), ": ",
                                           absl::StrJoin(*candidates, ", ", cut), "; name one as tensor");
    return Error(absl::StatusCode::kNotFound, "tensor",
                 absl::StrCat("'", source_.path, "' has no tensor '", kWeightTensor, "', ", there));
  }

  absl::Status Find(absl::string_view field, const std::string& name, const std::vector<int64_t>& shape,
                    SafetensorsView* view) {
    absl::StatusOr<SafetensorsView> found = model_->Find(name);
    if (!found.ok()) return OfFile(found.status(), field);
    if (found->shape != shape) {
      return Error(absl::StatusCode::kInvalidArgument, field,
                   absl::StrCat("tensor '", name, "' of '", source_.path, "' is ", Brackets(found->shape),
                                "; head '", source_.head, "' needs ", Brackets(shape)));
    }
    *view = *std::move(found);
    return absl::OkStatus();
  }

  absl::Status Stage(const std::string& write_id) {
    const int64_t vocab = head_->config().vocab_size;
    const int64_t row_bytes = head_->config().hidden_size * SizeOf(weight_.dtype);
    const int64_t most = std::max<int64_t>(1, kPieceBytes / row_bytes);
    absl::Time next_line = absl::Now() + kLogInterval;
    std::string rows_bytes;
    for (int64_t row = 0; row < vocab;) {
      if (absl::Status status = CheckGoingOn(); !status.ok()) return status;
      const int64_t rows = std::min(most, vocab - row);
      rows_bytes.resize(static_cast<size_t>(rows * row_bytes));
      absl::Status status =
          model_->Read(weight_, row * row_bytes, std::as_writable_bytes(std::span(rows_bytes)));
      if (!status.ok()) return OfFile(status, "path");
      const absl::StatusOr<std::string> bias = ReadBias(row, rows);
      if (!bias.ok()) return bias.status();
      // Looked up each time: a write that was replaced must not be written to any more.
      const absl::StatusOr<std::shared_ptr<engine::StagedWrite>> write = head_->FindWrite(write_id);
      if (!write.ok()) return write.status();
      status = (*write)->Write(row, rows, ToEngine(weight_.dtype), rows_bytes, *bias);
      if (!status.ok()) {
        // Another load may have taken the write in between.
        const auto still = head_->FindWrite(write_id);
        return still.ok() ? status : still.status();
      }
      row += rows;
      if (absl::Now() < next_line) continue;
      next_line = absl::Now() + kLogInterval;
      Log(LogLevel::kInfo, "loading weights",
          {{"head", source_.head}, {"rows", row}, {"of", vocab}, {"percent", row * 100 / vocab}});
    }
    return absl::OkStatus();
  }

  absl::Status OfWrite(const absl::Status& status) const {
    if (engine::ReasonOf(status) != RejectReason::kUnknownWrite) return status;
    return Error(absl::StatusCode::kAborted, "head",
                 absl::StrCat("another write or load of head '", source_.head,
                              "' has begun since and taken the place of this one, of which nothing was "
                              "published; if these weights are still wanted, load them again"));
  }

  // In fp32; empty if the head has none.
  absl::StatusOr<std::string> ReadBias(int64_t row, int64_t rows) const {
    if (!head_->config().bias) return std::string();
    const int64_t element = SizeOf(bias_.dtype);
    std::string read(static_cast<size_t>(rows * element), '\0');
    absl::Status status = model_->Read(bias_, row * element, std::as_writable_bytes(std::span(read)));
    if (!status.ok()) return OfFile(status, "path");
    std::string wide(static_cast<size_t>(rows) * sizeof(float), '\0');
    kernels::Convert(ToEngine(bias_.dtype), read.data(), DataType::kFloat32, wide.data(), rows);
    return wide;
  }

  absl::Status CheckGoingOn() const {
    if (absl::Status status = engine_->CheckServing(); !status.ok()) return status;
    if (!cancelled_()) return absl::OkStatus();
    return Error(absl::StatusCode::kCancelled, "", "the load was cancelled; nothing was published");
  }

  engine::Engine* const engine_;
  const WeightSource& source_;
  const std::function<bool()>& cancelled_;
  std::shared_ptr<engine::Head> head_;
  std::optional<SafetensorsModel> model_;
  std::string tensor_;
  SafetensorsView weight_;
  SafetensorsView bias_;
};

}  // namespace

absl::StatusOr<LoadedWeights> WeightLoader::Load(const WeightSource& source,
                                                 const std::function<bool()>& cancelled) const {
  if (absl::Status status = engine_->CheckServing(); !status.ok()) return status;
  if (folder_.empty()) {
    return Error(absl::StatusCode::kFailedPrecondition, "path",
                 "the server loads no weights by itself; start lossd with --weights_dir, or send them");
  }
  absl::Status status = CheckLength("path", source.path, kMostPath);
  status.Update(CheckLength("tensor", source.tensor, kMostTensorName));
  status.Update(CheckLength("bias_tensor", source.bias_tensor, kMostTensorName));
  if (!status.ok()) return status;

  const absl::Time begin = absl::Now();
  Loading loading(engine_, source, cancelled);
  if (status = loading.Open(folder_); !status.ok()) return status;
  Log(LogLevel::kInfo, "loading weights",
      {{"head", source.head}, {"path", source.path}, {"bytes", loading.bytes()}});
  absl::StatusOr<LoadedWeights> loaded = loading.Run();
  if (!loaded.ok()) {
    Log(LogLevel::kWarning, "weights were not loaded",
        {{"head", source.head}, {"path", source.path}, {"reason", std::string(loaded.status().message())}});
    return loaded;
  }
  Log(LogLevel::kInfo, "loaded weights",
      {{"head", source.head},
       {"path", source.path},
       {"tensor", loaded->tensor},
       {"weight_version", loaded->weight_version},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - begin)}});
  return loaded;
}

}  // namespace lossd::rpc
