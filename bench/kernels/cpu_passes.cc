#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "bench/kernels/passes.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::bench {
namespace {

// operator new aligns to 16 bytes, the step's workspace wants 64.
struct alignas(64) Line {
  char bytes[64];
};

template <class T>
bool Read(const std::string& path, std::vector<T>* values) {
  std::ifstream file(path, std::ios::binary);
  return file.read(reinterpret_cast<char*>(values->data()), static_cast<int64_t>(values->size() * sizeof(T)))
      .good();
}

template <class T>
bool Write(const std::string& path, const std::vector<T>& values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<int64_t>(values.size() * sizeof(T)));
  return file.flush().good();
}

class CpuPasses : public Passes {
 public:
  explicit CpuPasses(const KernelCase& kernel_case) : case_(kernel_case) {}

  std::string Prepare(const std::string& folder) override {
    const auto element = static_cast<size_t>(kernels::SizeOf(case_.dtype));
    const auto tokens = static_cast<size_t>(case_.tokens);
    const auto weights = static_cast<size_t>(case_.vocab * case_.hidden);
    weight_.resize(weights * element);
    hidden_states_.resize(static_cast<size_t>(case_.tokens * case_.hidden) * element);
    labels_.resize(tokens);
    if (!Read(folder + "/weight.bin", &weight_) || !Read(folder + "/hidden_states.bin", &hidden_states_) ||
        !Read(folder + "/labels.bin", &labels_)) {
      return "the inputs in " + folder + " are not there or too short";
    }
    losses_.resize(tokens);
    dx_.resize(hidden_states_.size());
    dw_.resize(weights);
    workspace_.resize(static_cast<size_t>(case_.workspace_bytes) / sizeof(Line));
    Describe();
    if (std::string error = Run(kernels::WeightGradient::kOverwrite); !error.empty()) return error;
    const bool written = Write(folder + "/losses.bin", losses_) && Write(folder + "/dx.bin", dx_) &&
                         Write(folder + "/dw.bin", dw_);
    return written ? "" : "the outputs could not be written to " + folder;
  }

  std::string Time(int64_t count, kernels::WeightGradient weight_gradient,
                   std::vector<double>* milliseconds) override {
    for (int64_t i = -1; i < count; ++i) {
      const auto began = std::chrono::steady_clock::now();
      if (std::string error = Run(weight_gradient); !error.empty()) return error;
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
      if (i >= 0) milliseconds->push_back(took.count());
    }
    return "";
  }

 private:
  void Describe() {
    const auto valid = std::count_if(labels_.begin(), labels_.end(),
                                     [this](int64_t label) { return label != params_.ignore_index; });
    params_.tokens = case_.tokens;
    params_.vocab = case_.vocab;
    params_.hidden = case_.hidden;
    params_.weight_type = params_.hidden_type = params_.dx_type = case_.dtype;
    params_.weight = weight_.data();
    params_.hidden_states = hidden_states_.data();
    params_.labels = labels_.data();
    params_.gradient_scale = 1.0f / static_cast<float>(std::max<int64_t>(1, valid));
    params_.losses = losses_.data();
    params_.dx = dx_.data();
    params_.dw = dw_.data();
    params_.workspace = workspace_.data();
    params_.workspace_bytes = static_cast<int64_t>(workspace_.size() * sizeof(Line));
    tile_rows_ = std::min(
        case_.tokens, kernels::RowsWithin(params_.workspace_bytes, case_.vocab, case_.hidden, case_.dtype));
  }

  std::string Run(kernels::WeightGradient weight_gradient) {
    params_.weight_gradient = weight_gradient;
    const kernels::Status status = kernels::CpuLinearCrossEntropy(params_, nullptr);
    return status == kernels::Status::kOk ? ""
                                          : std::string("the step failed: ") + kernels::StatusName(status);
  }

  const KernelCase case_;
  std::vector<char> weight_, hidden_states_, dx_;
  std::vector<int64_t> labels_;
  std::vector<float> losses_, dw_;
  std::vector<Line> workspace_;
  kernels::LinearCrossEntropyParams params_;
};

}  // namespace

std::unique_ptr<Passes> MakeCpuPasses(const KernelCase& kernel_case) {
  return std::make_unique<CpuPasses>(kernel_case);
}

}  // namespace lossd::bench
