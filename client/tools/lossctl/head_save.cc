// lossctl head save
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "client/src/common/safetensors_type.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/head_info.h"
#include "nlohmann/json.hpp"
#include "proto/safetensors/safetensors.h"

namespace lossd::tools {
namespace {

struct SaveOptions {
  std::string name;
  std::string path;
  std::string tensor = "lm_head.weight";
  std::string bias = "lm_head.bias";
  std::string dtype;  // empty: the head's own
};

constexpr int64_t kPieceBytes = int64_t{64} << 20;
constexpr int kMostRestarts = 8;

// Row range by row range, so that no machine needs room for all of it. ABORTED if the weights changed
// meanwhile.
absl::StatusOr<uint64_t> SaveOneVersion(const Head& head, DataType type, const SaveOptions& options,
                                        const Progress& progress) {
  const HeadConfig& config = head.config();
  // First, so that a full disk shows before anything is transferred.
  std::vector<SafetensorsTensor> tensors = {{.name = options.tensor,
                                             .dtype = internal::ToSafetensors(type),
                                             .shape = {config.vocab_size, config.hidden_size}}};
  if (config.bias) tensors.push_back({.name = options.bias, .shape = {config.vocab_size}});
  auto writer = SafetensorsWriter::Create(options.path, std::move(tensors), {{"format", "pt"}});
  if (!writer.ok()) return writer.status();

  const int64_t row_bytes = config.hidden_size * SizeOf(type);
  const int64_t most = std::clamp<int64_t>(kPieceBytes / row_bytes, 1, config.vocab_size);
  std::vector<std::byte> weights(static_cast<size_t>(most * row_bytes));
  std::vector<float> bias(static_cast<size_t>(config.bias ? config.vocab_size : 0));
  uint64_t version = 0;
  for (int64_t row = 0; row < config.vocab_size;) {
    const int64_t rows = std::min(most, config.vocab_size - row);
    const std::span<float> bias_rows = std::span(bias).subspan(config.bias ? static_cast<size_t>(row) : 0,
                                                               config.bias ? static_cast<size_t>(rows) : 0);
    const auto read = head.ReadRows(row, rows, type, weights.data(),
                                    {.bias = bias_rows, .progress = [&](int64_t done, int64_t) {
                                       progress(row * row_bytes + done, config.vocab_size * row_bytes);
                                     }});
    if (!read.ok()) return read.status();
    if (version != 0 && *read != version) {
      return absl::AbortedError(absl::StrCat("the weights of head '", config.name, "' went from version ",
                                             version, " to ", *read, " while they were saved"));
    }
    version = *read;
    absl::Status status = writer->Append({weights.data(), static_cast<size_t>(rows * row_bytes)});
    if (!status.ok()) return status;
    row += rows;
  }
  absl::Status status = writer->Append(std::as_bytes(std::span(bias)));
  if (status.ok()) status = writer->Finish();
  if (!status.ok()) return status;
  return version;
}

absl::Status Save(const Context& context, const SaveOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto head = (*client)->GetHead(options.name);
  if (!head.ok()) return WithAdvice(head.status(), NotFoundAdvice(head.status()));
  const HeadConfig& config = head->config();
  const DataType type = ParseDtype(options.dtype).value_or(config.weight_type);

  absl::StatusOr<uint64_t> version;
  {
    ProgressBar bar(absl::StrCat("saving ", options.name), context.progress_style());
    const Progress progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    int restarts = 0;
    do {
      version = SaveOneVersion(*head, type, options, progress);
    } while (absl::IsAborted(version.status()) && ++restarts < kMostRestarts);
  }
  if (absl::IsFailedPrecondition(version.status())) {
    return WithAdvice(version.status(),
                      absl::StrCat("load some first: 'lossctl head load ", options.name, " PATH'"));
  }
  if (!version.ok()) return version.status();

  const int64_t bytes = config.vocab_size * config.hidden_size * SizeOf(type);
  nlohmann::ordered_json json = {{"head", config.name},
                                 {"file", options.path},
                                 {"tensor", options.tensor},
                                 {"vocab_size", config.vocab_size},
                                 {"hidden_size", config.hidden_size},
                                 {"dtype", Name(type)},
                                 {"bytes", bytes},
                                 {"weight_version", *version}};
  if (config.bias) json["bias_tensor"] = options.bias;
  context.Print(json, absl::StrCat("Saved head '", config.name, "' to '", options.path,
                                   "': ", DescribeShape(config.vocab_size, config.hidden_size, type), ", ",
                                   FormatBytes(bytes), config.bias ? ", with its bias" : "",
                                   ", weight version ", *version, ".\n"));
  return absl::OkStatus();
}

}  // namespace

void AddHeadSaveCommand(CLI::App& head, Context& context) {
  auto options = std::make_shared<SaveOptions>();
  CLI::App* command = head.add_subcommand("save", "Save a head's weights as safetensors");
  command->add_option("NAME", options->name, "Name of the head")->required()->type_name("HEAD");
  command->add_option("FILE", options->path, "File to write; it appears only when it is complete")
      ->required()
      ->type_name("FILE");
  command->add_option("--tensor", options->tensor, "Name of the tensor in the file (default: lm_head.weight)")
      ->type_name("TENSOR");
  command
      ->add_option("--bias-name", options->bias,
                   "Name of the bias's tensor, float32, if the head has one (default: lm_head.bias)")
      ->type_name("TENSOR");
  AddDtypeOption(*command, options->dtype, "Element type in the file (default: the head's)");
  AddCommonOptions(*command, context);
  command->footer(
      "All rows are of one weight version. float32 of a head with an fp32 master is the master.\n\n"
      "Examples:\n"
      "  lossctl head save lm_head head.safetensors\n"
      "  lossctl head save lm_head head-fp32.safetensors --dtype float32\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Save(context, *options); }; });
}

}  // namespace lossd::tools
