// lossctl head load
#include <memory>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/safetensors.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/head_info.h"
#include "client/tools/lossctl/head_options.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

// Where models that tie their output to their input keep the weight of the head.
constexpr char kTiedTensor[] = "model.embed_tokens.weight";

struct LoadOptions {
  std::string name;
  std::string path;
  std::string tensor = "lm_head.weight";
  bool create = false;
  // Of a head that is created.
  std::string dtype;  // empty: as in the file
  HeadOptions head;
};

absl::StatusOr<SafetensorsView> FindWeight(SafetensorsModel& model, const LoadOptions& options) {
  auto view = model.Find(options.tensor);
  if (!view.ok()) {
    const bool tied = options.tensor != kTiedTensor && model.Contains(kTiedTensor);
    return WithAdvice(
        view.status(),
        tied ? absl::StrCat("does the model tie its head to its embedding? then: --tensor ", kTiedTensor)
             : "name one of its tensors with --tensor");
  }
  if (view->shape.size() != 2) {
    return WithAdvice(absl::InvalidArgumentError(absl::StrCat("tensor '", options.tensor, "' has shape [",
                                                              absl::StrJoin(view->shape, ", "),
                                                              "]; a head needs [vocabulary, hidden size]")),
                      "name another tensor with --tensor");
  }
  return view;
}

absl::StatusOr<Head> FindOrCreateHead(Client& client, const LoadOptions& options,
                                      const SafetensorsView& weight) {
  if (options.create) {
    auto head =
        client.CreateHead(WithOptions({.name = options.name,
                                       .vocab_size = weight.shape[0],
                                       .hidden_size = weight.shape[1],
                                       .weight_type = ParseDtype(options.dtype).value_or(weight.dtype)},
                                      options.head));
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
        "tensor '", options.tensor, "' of '", options.path, "' is ", weight.shape[0], " x ", weight.shape[1],
        "; head '", options.name, "' is ", config.vocab_size, " x ", config.hidden_size));
  }
  return head;
}

absl::Status Load(const Context& context, const LoadOptions& options) {
  auto model = SafetensorsModel::Open(options.path);
  if (!model.ok()) return model.status();
  auto weight = FindWeight(*model, options);
  if (!weight.ok()) return weight.status();
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto head = FindOrCreateHead(**client, options, *weight);
  if (!head.ok()) return head.status();

  absl::StatusOr<uint64_t> version;
  {
    ProgressBar bar(absl::StrCat("loading ", options.name), context.progress_style());
    version = head->WriteWeights(weight->dtype, weight->data.data(),
                                 [&bar](int64_t done, int64_t total) { bar.Update(done, total); });
  }
  if (!version.ok()) return version.status();

  const HeadConfig& config = head->config();
  std::string text =
      absl::StrCat("Loaded '", options.tensor, "' into head '", config.name,
                   "': ", DescribeShape(config.vocab_size, config.hidden_size, config.weight_type),
                   ", weight version ", *version, ".\n");
  if (weight->dtype != config.weight_type) {
    absl::StrAppend(&text, "The file has ", Name(weight->dtype), ": values were converted to ",
                    Name(config.weight_type), ".\n");
  }
  context.Print({{"head", config.name},
                 {"file", options.path},
                 {"tensor", options.tensor},
                 {"file_dtype", Name(weight->dtype)},
                 {"vocab_size", config.vocab_size},
                 {"hidden_size", config.hidden_size},
                 {"dtype", Name(config.weight_type)},
                 {"weight_version", *version}},
                text);
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
  CLI::Option* create =
      command->add_flag("--create", options->create, "Create the head as the tensor's shape says");
  AddDtypeOption(*command, options->dtype, "With --create: element type of the head (default: the file's)")
      ->needs(create);
  for (CLI::Option* option : AddHeadOptions(*command, options->head)) option->needs(create);
  AddCommonOptions(*command, context);
  command->footer(
      "Batches that are under way finish with the old weights; the new ones are published whole. Values are\n"
      "converted to the head's element type, rounding to nearest even.\n\n"
      "Examples:\n"
      "  lossctl head load lm_head model/model.safetensors --create\n"
      "  lossctl head load teacher gemma2/ --tensor model.embed_tokens.weight --create --softcap 30 "
      "--frozen\n"
      "  lossctl head load lm_head ~/models/llama                      # a directory with an index of "
      "shards\n"
      "  lossctl head load lm_head ~/models/gpt2 --tensor wte.weight   # head tied to the embedding\n");
  command->callback(
      [&context, options] { context.run = [&context, options] { return Load(context, *options); }; });
}

}  // namespace lossd::tools
