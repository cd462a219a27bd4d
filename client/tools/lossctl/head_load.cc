// lossctl head load
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/common/data_type.h"
#include "client/src/common/safetensors_type.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/head_info.h"
#include "client/tools/lossctl/head_options.h"
#include "nlohmann/json.hpp"
#include "proto/safetensors/safetensors.h"

namespace lossd::tools {
namespace {

// Where models that tie their output to their input keep the weight of the head.
constexpr char kTiedTensor[] = "model.embed_tokens.weight";

constexpr char kWeightTensor[] = "lm_head.weight";
constexpr char kBiasTensor[] = "lm_head.bias";

struct LoadOptions {
  std::string name;
  std::string path;
  std::string tensor;  // empty: kWeightTensor
  std::string bias;    // tensor of the head's bias; empty: kBiasTensor
  bool on_server = false;
  bool create = false;
  // The options of a head that is created.
  std::string dtype;  // empty: as in the file
  HeadOptions head;
};

std::string WeightTensor(const LoadOptions& options) {
  return options.tensor.empty() ? kWeightTensor : options.tensor;
}

// Names the option only where the file has tensors that it could name.
std::string OtherTensorAdvice(SafetensorsModel& model, absl::string_view option,
                              const std::vector<int64_t>& shape) {
  const auto fitting = model.FindByShape(shape);
  if (!fitting.ok() || fitting->empty()) return "";
  if (fitting->size() == 1) {
    return absl::StrCat("does '", fitting->front(), "' hold it? then: ", option, " ", fitting->front());
  }
  return absl::StrCat("name one of its tensors with ", option);
}

std::string OtherWeightAdvice(SafetensorsModel& model, const std::string& tensor) {
  if (tensor != kTiedTensor && model.Contains(kTiedTensor)) {
    return absl::StrCat("does the model tie its head to its embedding? then: --tensor ", kTiedTensor);
  }
  return OtherTensorAdvice(model, "--tensor", {SafetensorsModel::kAnySize, SafetensorsModel::kAnySize});
}

absl::StatusOr<SafetensorsView> FindWeight(SafetensorsModel& model, const LoadOptions& options) {
  const std::string tensor = WeightTensor(options);
  auto view = model.Find(tensor);
  if (!view.ok()) {
    return WithAdvice(view.status(), model.Contains(tensor) ? "" : OtherWeightAdvice(model, tensor));
  }
  if (view->shape.size() != 2) {
    return WithAdvice(absl::InvalidArgumentError(absl::StrCat("tensor '", tensor, "' has shape [",
                                                              absl::StrJoin(view->shape, ", "),
                                                              "]; a head needs [vocabulary, hidden size]")),
                      OtherWeightAdvice(model, tensor));
  }
  return view;
}

std::string BiasTensor(const LoadOptions& options) {
  return options.bias.empty() ? kBiasTensor : options.bias;
}

// The model's, if it has one. An error if it was named and cannot be loaded.
absl::StatusOr<std::optional<SafetensorsView>> FindBias(SafetensorsModel& model, const LoadOptions& options,
                                                        int64_t vocab) {
  const std::string name = BiasTensor(options);
  if (options.bias.empty() && !model.Contains(name)) return std::nullopt;
  auto view = model.Find(name);
  if (!view.ok()) {
    return WithAdvice(view.status(),
                      model.Contains(name) ? "" : OtherTensorAdvice(model, "--bias-name", {vocab}));
  }
  if (view->shape == std::vector<int64_t>{vocab}) return *std::move(view);
  return WithAdvice(absl::InvalidArgumentError(
                        absl::StrCat("tensor '", name, "' has shape [", absl::StrJoin(view->shape, ", "),
                                     "]; the bias of '", WeightTensor(options), "' needs [", vocab, "]")),
                    OtherTensorAdvice(model, "--bias-name", {vocab}));
}

absl::Status NoBiasTensor(SafetensorsModel& model, const LoadOptions& options, int64_t vocab) {
  const std::string other = OtherTensorAdvice(model, "--bias-name", {vocab});
  return WithAdvice(
      absl::NotFoundError(absl::StrCat("head '", options.name, "' has a bias, and '", options.path,
                                       "' no tensor '", BiasTensor(options), "'")),
      other.empty() ? absl::StrCat("write its bias, [", vocab,
                                   "], to the file (--bias-name names it), or create a head without a bias")
                    : other);
}

absl::StatusOr<Head> FindOrCreateHead(Client& client, SafetensorsModel& model, const LoadOptions& options,
                                      const SafetensorsView& weight, bool has_bias) {
  if (options.create) {
    HeadConfig config = WithOptions(
        {.name = options.name,
         .vocab_size = weight.shape[0],
         .hidden_size = weight.shape[1],
         .weight_type = ParseDtype(options.dtype).value_or(internal::FromSafetensors(weight.dtype))},
        options.head);
    if (config.bias && !has_bias) return NoBiasTensor(model, options, weight.shape[0]);
    config.bias = has_bias;
    auto head = client.CreateHead(config);
    if (!head.ok()) return WithAdvice(head.status(), CreateAdvice(head.status()));
    return head;
  }
  auto head = client.GetHead(options.name);
  if (absl::IsNotFound(head.status())) {
    return WithAdvice(head.status(),
                      "--create makes it as the file needs it; 'lossctl head list' shows those there");
  }
  if (!head.ok()) return head.status();
  const HeadConfig& config = head->config();
  if (weight.shape[0] != config.vocab_size || weight.shape[1] != config.hidden_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", WeightTensor(options), "' of '", options.path, "' is ", weight.shape[0], " x ",
        weight.shape[1], "; head '", options.name, "' is ", config.vocab_size, " x ", config.hidden_size));
  }
  if (config.bias && !has_bias) return NoBiasTensor(model, options, weight.shape[0]);
  if (!config.bias && !options.bias.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("head '", options.name, "' was created without a bias, which '", options.bias, "' is"));
  }
  return head;
}

std::vector<float> Widen(const SafetensorsView& view) {
  std::vector<float> values(static_cast<size_t>(view.shape[0]));
  internal::ConvertElements(internal::FromSafetensors(view.dtype), view.data.data(), DataType::kFloat32,
                            values.data(), view.shape[0]);
  return values;
}

// What becomes of the file's bias.
std::string BiasNote(const LoadOptions& options, const HeadConfig& head, bool in_file) {
  if (head.bias) return absl::StrCat("With the bias '", BiasTensor(options), "'.\n");
  return in_file ? absl::StrCat("The head has no bias: '", BiasTensor(options), "' was left out.\n") : "";
}

std::string LoadedText(const std::string& tensor, const HeadConfig& config, uint64_t version) {
  return absl::StrCat("Loaded '", tensor, "' into head '", config.name,
                      "': ", DescribeShape(config.vocab_size, config.hidden_size, config.weight_type),
                      ", weight version ", version, ".\n");
}

nlohmann::ordered_json LoadedJson(const LoadOptions& options, const std::string& tensor,
                                  const HeadConfig& config, uint64_t version) {
  nlohmann::ordered_json json = {{"head", config.name},
                                 {"file", options.path},
                                 {"tensor", tensor},
                                 {"vocab_size", config.vocab_size},
                                 {"hidden_size", config.hidden_size},
                                 {"dtype", Name(config.weight_type)},
                                 {"weight_version", version}};
  if (config.bias) json["bias_tensor"] = BiasTensor(options);
  return json;
}

absl::Status Load(const Context& context, const LoadOptions& options) {
  auto model = SafetensorsModel::Open(options.path);
  if (!model.ok()) return model.status();
  auto weight = FindWeight(*model, options);
  if (!weight.ok()) return weight.status();
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  const auto bias_view = FindBias(*model, options, weight->shape[0]);
  if (!bias_view.ok()) return bias_view.status();
  auto head = FindOrCreateHead(**client, *model, options, *weight, bias_view->has_value());
  if (!head.ok()) return head.status();
  const std::vector<float> bias = head->config().bias ? Widen(**bias_view) : std::vector<float>();

  absl::StatusOr<uint64_t> version;
  {
    ProgressBar bar(absl::StrCat("loading ", options.name), context.progress_style());
    version = head->WriteWeights(internal::FromSafetensors(weight->dtype), weight->data.data(), bias,
                                 [&bar](int64_t done, int64_t total) { bar.Update(done, total); });
  }
  if (!version.ok()) return version.status();

  const HeadConfig& config = head->config();
  const DataType file_type = internal::FromSafetensors(weight->dtype);
  std::string text = LoadedText(WeightTensor(options), config, *version);
  if (file_type != internal::StagedType(config)) {
    absl::StrAppend(&text, "The file has ", Name(file_type), ": values were converted to ",
                    Name(internal::StagedType(config)), ".\n");
  }
  absl::StrAppend(&text, BiasNote(options, config, bias_view->has_value()));
  nlohmann::ordered_json json = LoadedJson(options, WeightTensor(options), config, *version);
  json["file_dtype"] = Name(file_type);
  context.Print(json, text);
  return absl::OkStatus();
}

// The server reads the file itself: nothing of it passes through here.
absl::Status LoadOnServer(const Context& context, const LoadOptions& options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto head = (*client)->GetHead(options.name);
  if (!head.ok()) return WithAdvice(head.status(), NotFoundAdvice(head.status()));
  absl::StatusOr<LoadedWeights> loaded;
  {
    ProgressBar bar(absl::StrCat("loading ", options.name), context.progress_style());
    loaded =
        head->LoadWeights({.path = options.path,
                           .tensor = options.tensor,
                           .bias_tensor = options.bias,
                           .progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); }});
  }
  if (!loaded.ok()) return loaded.status();
  nlohmann::ordered_json json = LoadedJson(options, loaded->tensor, head->config(), loaded->weight_version);
  json["on_server"] = true;
  context.Print(json, LoadedText(loaded->tensor, head->config(), loaded->weight_version));
  return absl::OkStatus();
}

}  // namespace

void AddHeadLoadCommand(CLI::App& head, Context& context) {
  auto options = std::make_shared<LoadOptions>();
  CLI::App* command = head.add_subcommand("load", "Load a head's weights from safetensors");
  command->add_option("NAME", options->name, "Name of the head")->required()->type_name("HEAD");
  command->add_option("PATH", options->path, "FILE.safetensors, or the directory of a model (sharded or not)")
      ->required()
      ->type_name("PATH");
  command->add_option("--tensor", options->tensor, "Tensor to load (default: lm_head.weight)")
      ->type_name("TENSOR");
  command->add_option("--bias-name", options->bias, "Tensor of a head's bias (default: lm_head.bias)")
      ->type_name("TENSOR");
  CLI::Option* create =
      command->add_flag("--create", options->create,
                        "Create the head as the tensor's shape says, with a bias if the file has one");
  command
      ->add_flag(
          "--on-server", options->on_server,
          "PATH is below the server's --weights_dir: it reads the file, and nothing passes through here")
      ->excludes(create);
  AddDtypeOption(*command, options->dtype, "With --create: element type of the head (default: the file's)")
      ->needs(create);
  for (CLI::Option* option : AddHeadOptions(*command, options->head)) option->needs(create);
  AddCommonOptions(*command, context);
  command->footer(
      "Batches that are under way finish with the old weights; the new ones are published whole. Values are\n"
      "converted to the head's element type, rounding to nearest even, or kept in fp32 where the head has a\n"
      "master. With --on-server and without --tensor the only tensor of the head's shape does, too.\n\n"
      "Examples:\n"
      "  lossctl head load lm_head model/model.safetensors --create\n"
      "  lossctl head load teacher gemma2/ --tensor model.embed_tokens.weight --create --softcap 30 "
      "--frozen\n"
      "  lossctl head load lm_head ~/models/llama                      # a directory with an index of "
      "shards\n"
      "  lossctl head load lm_head ~/models/gpt2 --tensor wte.weight   # head tied to the embedding\n"
      "  lossctl head load lm_head llama/step-900 --on-server          # from the server's own volume\n");
  command->callback([&context, options] {
    context.run = [&context, options] {
      return options->on_server ? LoadOnServer(context, *options) : Load(context, *options);
    };
  });
}

}  // namespace lossd::tools
