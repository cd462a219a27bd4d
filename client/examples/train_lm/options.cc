#include "client/examples/train_lm/options.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>

namespace lossd::train_lm {
namespace {

constexpr int kUsageError = 2;

constexpr char kDescription[] =
    R"(Trains a small next-token language model whose last stage lives in a lossd server.

The trunk (embeddings of a context window and one hidden layer) is computed here. The head (weights [vocabulary, hidden], logits,
loss, weight gradient and AdamW) is computed by lossd: hidden states and labels go there, losses and input gradients come back. No
[tokens, vocabulary] logits are held anywhere, and no [vocabulary, hidden] tensor travels after the first weights. Whole chapters are held out to measure the perplexity.)";

constexpr char kFooter[] =
    R"(Examples:
  train_lm --server localhost:50051              train on the Debian manuals
  train_lm --text book.txt notes.txt.gz          train on your own text
  train_lm --local                               the same without a server, to compare
  train_lm --head demo --steps 300               keep the trained head on the server as "demo";
                                                 lossctl head save demo demo.safetensors writes it to a file

Small texts need a smaller vocabulary (--vocabulary 2000 for 200 kB or so) and more epochs.
The same text, seed and number of threads give the same run with --local.)";

void AddTextOptions(CLI::App* app, Options* options) {
  app->add_option(
         "--text", options->texts,
         "Text files, plain or .gz, UTF-8. Default: the manuals of the packages debian-reference-en, "
         "debian-policy and developers-reference")
      ->type_name("FILE...")
      ->group("Text");
  app->add_option("--text-dir", options->text_directory, "Folder that holds the three default manuals")
      ->envname("TRAIN_LM_TEXT_DIR")
      ->type_name("DIR")
      ->group("Text");
  app->add_option("--vocabulary", options->vocabulary,
                  "Pieces of the tokenizer (SentencePiece, BPE), at most")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str()
      ->group("Text");
}

void AddHeadOptions(CLI::App* app, Options* options) {
  auto* const server = app->add_option("--server", options->server, "Address of lossd")
                           ->type_name("HOST:PORT")
                           ->capture_default_str()
                           ->group("Head");
  tools::AddConnectionOptions(*app, options->connection, "Head");
  app->add_flag_function(
         "--local", [options](int64_t) { options->place = HeadPlace::kThisProcess; },
         "Compute the head in this process instead: follows the same losses")
      ->excludes(server)
      ->group("Head");
  auto* const head_name =
      app->add_option(
             "--head", options->head_name,
             "Name of the head, which then stays on the server; without it the head is deleted at the end")
          ->type_name("NAME")
          ->group("Head");
  auto* const folder =
      app->add_option(
             "--checkpoint-dir", options->checkpoint_folder,
             "Save the run in this folder, and its head at the server (--checkpoint_dir of lossd), and go "
             "on from there, here after a crash of the server, or when started again")
          ->type_name("DIR")
          ->needs(head_name)
          ->group("Head");
  app->add_option("--checkpoint-every", options->checkpoint_every, "Steps between two of them")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str()
      ->needs(folder)
      ->group("Head");
  const std::map<std::string, HeadPrecision> precisions = {{"bf16", HeadPrecision::kBFloat16},
                                                           {"fp32", HeadPrecision::kFloat32}};
  app->add_option_function<std::string>(
         "--dtype",
         [options, precisions](const std::string& name) { options->precision = precisions.at(name); },
         "What the head computes with; sums are fp32 in any case")
      ->check(CLI::IsMember(precisions))
      ->default_str("bf16")
      ->group("Head");
}

void AddTrainingOptions(CLI::App* app, Options* options) {
  TrainerOptions* const trainer = &options->trainer;
  app->add_option("--epochs", options->epochs, "Passes over the training text")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str()
      ->group("Training");
  app->add_option("--steps", trainer->steps, "Optimizer steps, instead of --epochs")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->group("Training");
  app->add_option("--batch", trainer->batch, "Tokens sent to the head at once")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str()
      ->group("Training");
  app->add_option("--accumulate", trainer->accumulate,
                  "Batches of one step: their gradients add up in the head")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->group("Training");
  app->add_option("--learning-rate", trainer->learning_rate, "Highest learning rate of AdamW")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str()
      ->group("Training");
  app->add_option("--weight-decay", trainer->weight_decay, "Weight decay of AdamW")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str()
      ->group("Training");
  app->add_option("--seed", trainer->seed, "Initial weights, order of the text, dropout")
      ->capture_default_str()
      ->group("Training");
  app->add_option("--threads", options->threads, "Threads of the trunk (and of a local head); 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str()
      ->group("Training");
}

void AddTrunkOptions(CLI::App* app, Options* options) {
  TrunkConfig* const trunk = &options->trainer.trunk;
  app->add_option("--hidden", trunk->hidden, "Width of the hidden states")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 16))
      ->capture_default_str()
      ->group("Trunk");
  app->add_option("--embedding", trunk->embedding, "Width of a token's embedding")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str()
      ->group("Trunk");
  app->add_option("--context", trunk->context, "Tokens before a position that are seen one by one")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->capture_default_str()
      ->group("Trunk");
  app->add_option("--history", trunk->history, "Tokens before a position that are seen as a decaying sum")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->capture_default_str()
      ->group("Trunk");
  app->add_option_function<double>(
         "--dropout",
         [trunk](const double& probability) { trunk->feature_dropout = trunk->hidden_dropout = probability; },
         "Probability of dropout, on the embeddings and behind the hidden layer")
      ->check(CLI::Range(0.0, 0.9))
      ->default_str("0.2")
      ->group("Trunk");
}

void AddOutputOptions(CLI::App* app, Options* options) {
  app->add_option("--evaluations", options->evaluations,
                  "How often the held-out perplexity is taken on the way")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str()
      ->group("Output");
  app->add_flag_function(
         "--quiet", [options](int64_t) { options->verbosity = Verbosity::kQuiet; },
         "Print nothing but the summary")
      ->group("Output");
  app->add_option("--json", options->json, "Write the results to a file as well")
      ->type_name("FILE")
      ->group("Output");
}

}  // namespace

ParsedOptions ParseOptions(int argc, char** argv) {
  CLI::App app(kDescription, "train_lm");
  app.footer(kFooter);
  Options options;
  AddTextOptions(&app, &options);
  AddHeadOptions(&app, &options);
  AddTrainingOptions(&app, &options);
  AddTrunkOptions(&app, &options);
  AddOutputOptions(&app, &options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      return {std::nullopt, app.exit(error)};  // --help
    }
    std::cerr << "train_lm: " << error.what() << "\n  see 'train_lm --help'\n";
    return {std::nullopt, kUsageError};
  }
  return {options, 0};
}

}  // namespace lossd::train_lm
