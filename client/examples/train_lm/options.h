// The command line.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_OPTIONS_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/examples/train_lm/head.h"
#include "client/examples/train_lm/trainer.h"
#include "client/tools/connection_options.h"
#include "lossd/client.h"

namespace lossd::train_lm {

enum class HeadPlace { kServer, kThisProcess };
enum class Verbosity { kProgress, kQuiet };

struct Options {
  std::vector<std::string> texts;
  std::string text_directory;
  int64_t vocabulary = 8192;

  HeadPlace place = HeadPlace::kServer;
  std::string server = "localhost:50051";
  tools::ConnectionOptions connection;
  std::string head_name;          // empty: one that no other run uses, deleted at the end
  std::string checkpoint_folder;  // empty: the run is not saved
  int64_t checkpoint_every = 50;  // steps
  HeadPrecision precision = HeadPrecision::kBFloat16;

  TrainerOptions trainer;  // steps is filled in from `epochs` unless it is given
  double epochs = 1;
  int64_t evaluations = 6;
  int threads = 0;  // 0: all cores

  Verbosity verbosity = Verbosity::kProgress;
  std::string json;
};

struct ParsedOptions {
  std::optional<Options>
      options;  // empty: the program ends with exit_code (help was asked for, or an error printed)
  int exit_code = 0;
};

ParsedOptions ParseOptions(int argc, char** argv);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_OPTIONS_H_
