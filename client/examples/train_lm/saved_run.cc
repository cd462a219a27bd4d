#include "client/examples/train_lm/saved_run.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace lossd::train_lm {
namespace {

using nlohmann::json;

constexpr char kFile[] = "train_lm.run";

absl::Status Failed(const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
}

bool WriteAll(int file, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = write(file, data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    data += written;
    bytes -= static_cast<size_t>(written);
  }
  return true;
}

// False only for a disk that fails: some file systems cannot sync folders.
bool SyncFolder(const std::string& path) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  const bool failed = fsync(folder) != 0 && (errno == EIO || errno == ENOSPC || errno == EDQUOT);
  close(folder);
  return !failed;
}

// JSON has no numbers that are not finite.
json ToJson(const std::vector<double>& values) {
  json numbers = json::array();
  for (const double value : values) {
    if (std::isfinite(value)) {
      numbers.push_back(value);
    } else {
      numbers.push_back(std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
    }
  }
  return numbers;
}

std::vector<double> FromJson(const json& numbers) {
  std::vector<double> values;
  for (const json& number : numbers) {
    values.push_back(number.is_string() ? std::strtod(number.get<std::string>().c_str(), nullptr)
                                        : number.get<double>());
  }
  return values;
}

json Header(const SavedRun& run) {
  const TrainerState& trainer = run.trainer;
  std::vector<int64_t> evaluation_steps;
  std::vector<double> perplexities;
  for (const auto& [step, perplexity] : run.evaluations) {
    evaluation_steps.push_back(step);
    perplexities.push_back(perplexity);
  }
  return {{"format", 1},
          {"settings", run.settings},
          {"head_tag", run.head_tag},
          {"steps", trainer.steps},
          {"epoch", trainer.epoch},
          {"next_position", trainer.next_position},
          {"forwards", trainer.trunk.forwards},
          {"adam_steps", trainer.trunk.adam.steps},
          {"parameters", trainer.trunk.parameters.size()},
          {"tokens", run.tokens},
          {"training_seconds", run.training_seconds},
          {"losses", ToJson(run.losses)},
          {"evaluation_steps", evaluation_steps},
          {"perplexities", ToJson(perplexities)}};
}

SavedRun FromHeader(const json& header) {
  SavedRun run;
  run.settings = header.at("settings").get<std::string>();
  run.head_tag = header.at("head_tag").get<std::string>();
  run.trainer.steps = header.at("steps").get<int64_t>();
  run.trainer.epoch = header.at("epoch").get<uint64_t>();
  run.trainer.next_position = header.at("next_position").get<uint64_t>();
  run.trainer.trunk.forwards = header.at("forwards").get<uint64_t>();
  run.trainer.trunk.adam.steps = header.at("adam_steps").get<int64_t>();
  run.tokens = header.at("tokens").get<int64_t>();
  run.training_seconds = header.at("training_seconds").get<double>();
  run.losses = FromJson(header.at("losses"));
  const std::vector<double> perplexities = FromJson(header.at("perplexities"));
  const auto steps = header.at("evaluation_steps").get<std::vector<int64_t>>();
  for (size_t i = 0; i < std::min(steps.size(), perplexities.size()); ++i) {
    run.evaluations.emplace_back(steps[i], perplexities[i]);
  }
  return run;
}

}  // namespace

absl::Status WriteSavedRun(const std::string& folder, const SavedRun& run) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return Failed(folder);
  const std::string path = absl::StrCat(folder, "/", kFile);
  const std::string temporary = absl::StrCat(path, ".new");
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return Failed(temporary);
  const std::string header = absl::StrCat(Header(run).dump(), "\n");
  bool written = WriteAll(file, header.data(), header.size());
  const TrunkState& trunk = run.trainer.trunk;
  for (const std::vector<float>* values : {&trunk.parameters, &trunk.adam.first, &trunk.adam.second}) {
    written = written &&
              WriteAll(file, reinterpret_cast<const char*>(values->data()), values->size() * sizeof(float));
  }
  written = written && fsync(file) == 0;
  close(file);
  if (!written || std::rename(temporary.c_str(), path.c_str()) != 0) return Failed(path);
  return SyncFolder(folder) ? absl::OkStatus() : Failed(folder);
}

absl::StatusOr<std::optional<SavedRun>> ReadSavedRun(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kFile);
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string header;
  std::getline(file, header);
  const std::string values{std::istreambuf_iterator<char>(file), {}};
  const absl::Status damaged = absl::DataLossError(
      absl::StrCat(path, " is no saved run, or not all of one: remove it to start again"));
  const json parsed = json::parse(header, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return damaged;
  try {
    SavedRun run = FromHeader(parsed);
    const auto parameters = parsed.at("parameters").get<size_t>();
    if (parsed.at("format") != 1 || values.size() % (3 * sizeof(float)) != 0 ||
        values.size() / (3 * sizeof(float)) != parameters) {
      return damaged;
    }
    TrunkState& trunk = run.trainer.trunk;
    const char* next = values.data();
    for (std::vector<float>* into : {&trunk.parameters, &trunk.adam.first, &trunk.adam.second}) {
      into->resize(parameters);
      std::memcpy(into->data(), next, parameters * sizeof(float));
      next += parameters * sizeof(float);
    }
    return run;
  } catch (const json::exception&) {
    return damaged;
  }
}

}  // namespace lossd::train_lm
