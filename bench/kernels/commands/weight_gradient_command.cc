#include "bench/kernels/commands/weight_gradient_command.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/kernels/command_line.h"
#include "bench/kernels/kernel_report.h"
#include "bench/kernels/weight_gradient_case.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;
using kernels::DataType;

struct WeightGradientOptions {
  std::string device = "cuda:0";
  std::string dtype = "bf16";
  WeightGradientCase one = {.vocab = 131072,
                            .hidden = 4096,
                            .rows = {1024, 2048, 4096, 8192},
                            .batch = 8192,
                            .memory_rows = 2048,
                            .repetitions = 9};
  bool json = false;
};

const char kWeightGradientDescription[] =
    "Measures on a Hopper GPU what it costs to add a chunk's part to the fp32 dW instead of making dW in one "
    "product: the "
    "step's own adding product, over a batch in chunks of several sizes, beside one bare cuBLAS product of "
    "the whole batch "
    "that overwrites dW, in turns; and the memory that a step over one chunk takes.";

const char kWeightGradientFooter[] =
    "Examples:\n"
    "  lossd-bench weight-gradient                                 the sizes of the bar: V=131072, H=4096\n"
    "  lossd-bench weight-gradient --rows=512,2048,8192 --json     other chunks, for scripts\n"
    "\nspeed is the bare product's time over the chunks' time, the median of the rounds: 1.00 is as fast as "
    "without adding. "
    "Results are checked against fp64 first.\n";

double Mebibytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// What a step over one chunk takes beyond weights, gradient, E, and the chunk's X and dX.
int64_t OtherBytes(const ChunkMemory& memory) { return memory.step_taken - memory.e; }

const ChunkSpeed* SpeedAt(const WeightGradientResult& result, int64_t rows) {
  for (const ChunkSpeed& chunk : result.chunks) {
    if (chunk.rows == rows) return &chunk;
  }
  return nullptr;
}

Json ToJson(const WeightGradientCase& c, const WeightGradientResult& r) {
  Json json = {{"vocab", c.vocab},
               {"hidden", c.hidden},
               {"dtype", ShortName(c.dtype)},
               {"batch", c.batch},
               {"bare", ToJson(r.bare)},
               {"chunks", Json::array()},
               {"relative_error_dw", r.dw_error}};
  for (const ChunkSpeed& chunk : r.chunks) {
    json["chunks"].push_back({{"rows", chunk.rows},
                              {"speed", chunk.ours_speed},
                              {"ours", ToJson(chunk.ours)},
                              {"cublas_speed", chunk.library_speed},
                              {"cublas", ToJson(chunk.library)}});
  }
  const ChunkMemory& m = r.memory;
  json["memory"] = {{"rows", c.memory_rows},
                    {"beyond_weights_gradient_e_x_dx_bytes", OtherBytes(m)},
                    {"product_taken_bytes", m.product_taken},
                    {"e_bytes", m.e},
                    {"x_bytes", m.x},
                    {"dx_bytes", m.dx},
                    {"weight_bytes", m.weight},
                    {"gradient_bytes", m.gradient}};
  json["hardware"] = r.hardware;
  if (!r.error.empty()) json["error"] = r.error;
  return json;
}

void PrintSpeed(const Measurement& part, const char* what, double speed) {
  std::printf("  %-34s %9.3f %9.1f %10.2f %8.1f %7.3f\n", what, part.milliseconds,
              part.work.operations / part.milliseconds * 1e-9, part.work.bytes * 1e-9,
              part.work.bytes / part.milliseconds * 1e-6, speed);
}

void PrintMemory(const WeightGradientCase& c, const ChunkMemory& m) {
  std::printf("\nmemory with %lld rows at once, MiB\n", static_cast<long long>(c.memory_rows));
  std::printf("  taken by the adding product alone          %9.1f\n", Mebibytes(m.product_taken));
  std::printf("  step: beyond weights, gradient, E, X, dX   %9.1f\n", Mebibytes(OtherBytes(m)));
  std::printf("  step: the same with the chunk's X and dX   %9.1f\n", Mebibytes(OtherBytes(m) + m.x + m.dx));
  std::printf("  beside them: X %.1f, dX %.1f, E %.1f, weights %.1f, gradient %.1f\n", Mebibytes(m.x),
              Mebibytes(m.dx), Mebibytes(m.e), Mebibytes(m.weight), Mebibytes(m.gradient));
}

void PrintTable(const WeightGradientCase& c, const WeightGradientResult& r) {
  std::printf("dW of %lld rows, vocabulary %lld, hidden %lld, %s; %s\n", static_cast<long long>(c.batch),
              static_cast<long long>(c.vocab), static_cast<long long>(c.hidden), ShortName(c.dtype).c_str(),
              r.hardware.c_str());
  std::printf("  %-34s %9s %9s %10s %8s %7s\n", "", "ms", "TFLOP/s", "GB moved", "GB/s", "speed");
  PrintSpeed(r.bare, "bare cuBLAS, at once, overwriting", 1.0);
  for (const ChunkSpeed& chunk : r.chunks) {
    const std::string rows = " in chunks of " + std::to_string(chunk.rows);
    PrintSpeed(chunk.ours, ("lossd, adding" + rows).c_str(), chunk.ours_speed);
    PrintSpeed(chunk.library, ("cuBLAS, adding" + rows).c_str(), chunk.library_speed);
  }
  for (const int64_t rows : {c.batch, c.memory_rows}) {
    const ChunkSpeed* const chunk = SpeedAt(r, rows);
    if (chunk == nullptr) continue;
    std::printf("\nadding %lld rows at once: %.3f times the speed of the bare product of %lld rows",
                static_cast<long long>(rows), chunk->ours_speed, static_cast<long long>(c.batch));
  }
  std::printf("\nrelative error of dW, at worst: %.1e\n", r.dw_error);
  PrintMemory(c, r.memory);
}

int RunWeightGradient(const WeightGradientOptions& options) {
  WeightGradientCase one = options.one;
  one.cuda_index = CudaIndex(options.device);
  one.dtype = options.dtype == "fp16" ? DataType::kFloat16 : DataType::kBFloat16;
#ifdef LOSSD_CUDA
  WeightGradientResult result;
  if (one.cuda_index < 0) {
    result.error = "this is about a GPU: --device=cuda:N";
  } else {
    result = RunWeightGradientCase(
        one, [](const std::string& what) { std::fprintf(stderr, "%s\n", what.c_str()); });
  }
#else
  WeightGradientResult result;
  result.error = "this lossd-bench was built without CUDA (no CUDA toolkit was found)";
#endif
  if (options.json) std::printf("%s\n", ToJson(one, result).dump(2).c_str());
  if (!result.error.empty()) {
    std::fprintf(stderr, "%s\n", result.error.c_str());
    return kFailed;
  }
  if (!options.json) PrintTable(one, result);
  return kDone;
}

}  // namespace

void AddWeightGradientCommand(CLI::App& app, int* exit_code) {
  CLI::App& command = *app.add_subcommand("weight-gradient", kWeightGradientDescription);
  command.footer(std::string(kWeightGradientFooter) + kExitCodes);
  const auto options = std::make_shared<WeightGradientOptions>();
  const CLI::Range size(int64_t{1}, int64_t{1} << 40);
  AddDeviceOption(command, options->device);
  command.add_option("--vocab", options->one.vocab, "Vocabulary size")->check(size)->capture_default_str();
  command.add_option("--hidden", options->one.hidden, "Hidden size")->check(size)->capture_default_str();
  AddSizeOption(command, "--rows", options->one.rows, "Rows of a chunk; each value is a measurement");
  command.add_option("--batch", options->one.batch, "Rows of the bare product, and of all chunks together")
      ->check(size)
      ->capture_default_str();
  command.add_option("--memory_rows", options->one.memory_rows, "Rows of the chunk whose memory is measured")
      ->check(size)
      ->capture_default_str();
  command.add_option("--dtype", options->dtype, "bf16 or fp16")
      ->check(CLI::IsMember({"bf16", "fp16"}))
      ->capture_default_str();
  AddRepetitionsOption(command, options->one.repetitions);
  command.add_flag("--json", options->json, "Print JSON instead of a table");
  command.callback([options, exit_code] { *exit_code = RunWeightGradient(*options); });
}

}  // namespace lossd::bench
