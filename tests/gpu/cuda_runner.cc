#include "tests/gpu/cuda_runner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "kernels/cuda/owners.h"

namespace lossd::kernels::testing {
namespace {

using cuda::BatchRows;
using cuda::CublasLt;
using cuda::LinearCrossEntropy;
using cuda::Path;
using cuda::Result;

constexpr int64_t kGuard = 4096;
constexpr unsigned char kPattern = 0xA5;

// Device memory with a guard area at both ends.
class GuardedBuffer {
 public:
  Result Create(const char* name, int64_t bytes, const void* from = nullptr) {
    name_ = name;
    bytes_ = bytes;
    LOSSD_CUDA_PASS_ON(cuda::DeviceBuffer::Create(Rounded() + 2 * kGuard, &buffer_));
    LOSSD_CUDA_TRY(cudaMemset(buffer_.data(), kPattern, static_cast<size_t>(Rounded() + 2 * kGuard)));
    if (from != nullptr) {
      LOSSD_CUDA_TRY(cudaMemcpy(data(), from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
    }
    return {};
  }

  char* data() const { return static_cast<char*>(buffer_.data()) + kGuard; }

  template <class T>
  Result Read(std::vector<T>* to) const {
    to->resize(static_cast<size_t>(bytes_) / sizeof(T));
    LOSSD_CUDA_TRY(cudaMemcpy(to->data(), data(), static_cast<size_t>(bytes_), cudaMemcpyDeviceToHost));
    return {};
  }

  // Sets *touched to the name if a guard area is not as it was made.
  Result Check(std::string* touched) const {
    std::vector<unsigned char> bytes(static_cast<size_t>(Rounded() + 2 * kGuard));
    LOSSD_CUDA_TRY(cudaMemcpy(bytes.data(), buffer_.data(), bytes.size(), cudaMemcpyDeviceToHost));
    const auto intact = [](unsigned char byte) { return byte == kPattern; };
    const auto end = bytes.begin() + kGuard + bytes_;
    if (!std::all_of(bytes.begin(), bytes.begin() + kGuard, intact) ||
        !std::all_of(end, bytes.end(), intact)) {
      *touched = name_;
    }
    return {};
  }

 private:
  // The end of what the step may touch is the start of the guard, to the byte; only the allocation is
  // rounded.
  int64_t Rounded() const { return (bytes_ + 255) / 256 * 256; }

  const char* name_ = "";
  int64_t bytes_ = 0;
  cuda::DeviceBuffer buffer_;
};

std::vector<unsigned char> PadRows(const std::vector<unsigned char>& rows, int64_t count, int64_t row_bytes,
                                   int64_t padded_bytes) {
  std::vector<unsigned char> padded(static_cast<size_t>(count * padded_bytes), 0);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(&padded[static_cast<size_t>(i * padded_bytes)], &rows[static_cast<size_t>(i * row_bytes)],
                static_cast<size_t>(row_bytes));
  }
  return padded;
}

BatchRows SelectRows(const Problem& problem, const CudaOptions& options, const LinearCrossEntropy& step) {
  const cuda::LabelledRows all{problem.labels.data(), problem.shape.tokens, kIgnoreIndex,
                               problem.gradient_scale};
  BatchRows rows = step.Arrange({&all, 1});
  if (options.shares.empty()) return rows;
  for (const int32_t row : rows.batch_rows) rows.shares.push_back(options.shares[static_cast<size_t>(row)]);
  return rows;
}

class Runner {
 public:
  Runner(const Problem& problem, const CudaOptions& options) : problem_(problem), options_(options) {}

  Result Run(CudaOutcome* outcome) {
    const auto [tokens, vocab, hidden] = problem_.shape;
    const int64_t padded = cuda::PaddedHidden(hidden);
    const int64_t element = SizeOf(problem_.weight_type);
    const int64_t tile_rows = options_.tile_rows == 0 ? tokens : options_.tile_rows;
    const LinearCrossEntropy::Shape shape{vocab, hidden, problem_.weight_type};
    const int64_t dx_bytes = tokens * hidden * SizeOf(options_.dx_type);

    GuardedBuffer weight, hidden_states, workspace, losses, log_sum_exps, dx, dw, largest, redone;
    const auto padded_weight = PadRows(problem_.weight, vocab, hidden * element, padded * element);
    LOSSD_CUDA_PASS_ON(weight.Create("weight", vocab * padded * element, padded_weight.data()));
    LOSSD_CUDA_PASS_ON(hidden_states.Create(
        "hidden_states", static_cast<int64_t>(problem_.hidden_states.size()), problem_.hidden_states.data()));
    LOSSD_CUDA_PASS_ON(
        workspace.Create("workspace", LinearCrossEntropy::WorkspaceBytes(shape, options_.path, tile_rows)));
    const std::vector<float> zeros(static_cast<size_t>(tokens), 0.0f);
    LOSSD_CUDA_PASS_ON(losses.Create("losses", tokens * 4, zeros.data()));
    LOSSD_CUDA_PASS_ON(log_sum_exps.Create("log_sum_exps", tokens * 4, zeros.data()));
    const std::vector<unsigned char> no_dx(static_cast<size_t>(dx_bytes), 0);
    LOSSD_CUDA_PASS_ON(dx.Create("dx", dx_bytes, no_dx.data()));
    const std::vector<float> initial_dw = InitialGradient(vocab, hidden, padded);
    LOSSD_CUDA_PASS_ON(dw.Create("dw", vocab * padded * 4, initial_dw.data()));
    LOSSD_CUDA_PASS_ON(largest.Create("largest", 4));
    const int32_t none = 0;
    LOSSD_CUDA_PASS_ON(redone.Create("rows_redone", 4, &none));
    std::unique_ptr<CublasLt> library;
    if (options_.path == Path::kPortable) LOSSD_CUDA_PASS_ON(CublasLt::Open(&library));
    LinearCrossEntropy step(shape, options_.path, tile_rows, workspace.data(), library.get());
    rows_ = SelectRows(problem_, options_, step);
    LOSSD_CUDA_PASS_ON(CreateArrays());

    LOSSD_CUDA_PASS_ON(cuda::LargestMagnitude(problem_.weight_type, weight.data(), vocab * padded,
                                              reinterpret_cast<float*>(largest.data()), nullptr));
    LinearCrossEntropy::Batch batch;
    batch.rows = rows_.rows;
    batch.batch_rows = reinterpret_cast<const int32_t*>(batch_rows_.data());
    batch.labels = reinterpret_cast<const int32_t*>(labels_.data());
    batch.gradient_scales = reinterpret_cast<const float*>(scales_.data());
    batch.shares = rows_.shares.empty() ? nullptr : reinterpret_cast<const float*>(shares_.data());
    batch.by_label = reinterpret_cast<const int32_t*>(by_label_.data());
    batch.weight = weight.data();
    batch.weight_largest = reinterpret_cast<const float*>(largest.data());
    batch.hidden_type = problem_.hidden_type;
    batch.hidden_states = hidden_states.data();
    batch.losses = reinterpret_cast<float*>(losses.data());
    batch.returns.log_sum_exp = reinterpret_cast<float*>(log_sum_exps.data());
    batch.dx_type = options_.dx_type;
    batch.dx = options_.dx_wanted ? dx.data() : nullptr;
    batch.weight_gradient = options_.weight_gradient;
    batch.dw = reinterpret_cast<float*>(dw.data());
    batch.rows_redone = reinterpret_cast<int32_t*>(redone.data());
    batch.exponent_bias = options_.exponent_bias;
    LOSSD_CUDA_PASS_ON(step.Run(batch, nullptr, nullptr));
    LOSSD_CUDA_TRY(cudaDeviceSynchronize());

    for (const GuardedBuffer* buffer :
         {&weight, &hidden_states, &workspace, &losses, &log_sum_exps, &dx, &dw, &largest, &redone,
          &batch_rows_, &labels_, &scales_, &shares_, &by_label_}) {
      LOSSD_CUDA_PASS_ON(buffer->Check(&outcome->touched));
    }
    std::vector<int32_t> count;
    LOSSD_CUDA_PASS_ON(redone.Read(&count));
    outcome->rows_redone = count[0];
    LOSSD_CUDA_PASS_ON(losses.Read(&outcome->losses));
    LOSSD_CUDA_PASS_ON(log_sum_exps.Read(&outcome->log_sum_exps));
    std::vector<unsigned char> narrow;
    LOSSD_CUDA_PASS_ON(dx.Read(&narrow));
    outcome->dx.resize(static_cast<size_t>(tokens * hidden));
    Convert(options_.dx_type, narrow.data(), DataType::kFloat32, outcome->dx.data(), tokens * hidden);
    std::vector<float> wide;
    LOSSD_CUDA_PASS_ON(dw.Read(&wide));
    outcome->dw.resize(static_cast<size_t>(vocab * hidden));
    for (int64_t v = 0; v < vocab; ++v) {
      std::copy_n(&wide[static_cast<size_t>(v * padded)], hidden,
                  &outcome->dw[static_cast<size_t>(v * hidden)]);
    }
    return {};
  }

 private:
  std::vector<float> InitialGradient(int64_t vocab, int64_t hidden, int64_t padded) const {
    std::vector<float> initial(static_cast<size_t>(vocab * padded), std::numeric_limits<float>::quiet_NaN());
    if (options_.initial_dw.empty()) return initial;
    for (int64_t v = 0; v < vocab; ++v) {
      std::copy_n(&options_.initial_dw[static_cast<size_t>(v * hidden)], hidden,
                  &initial[static_cast<size_t>(v * padded)]);
    }
    return initial;
  }

  Result CreateArrays() {
    const int64_t bytes = rows_.rows * 4;
    LOSSD_CUDA_PASS_ON(batch_rows_.Create("batch_rows", bytes, rows_.batch_rows.data()));
    LOSSD_CUDA_PASS_ON(labels_.Create("labels", bytes, rows_.labels.data()));
    LOSSD_CUDA_PASS_ON(scales_.Create("gradient_scales", bytes, rows_.gradient_scales.data()));
    LOSSD_CUDA_PASS_ON(
        shares_.Create("shares", static_cast<int64_t>(rows_.shares.size()) * 4, rows_.shares.data()));
    return by_label_.Create("by_label", bytes, rows_.by_label.data());
  }

  const Problem& problem_;
  const CudaOptions& options_;
  BatchRows rows_;
  GuardedBuffer batch_rows_, labels_, scales_, shares_, by_label_;
};

}  // namespace

bool CanRun(Path path, DataType weight_type) {
  Path best = Path::kPortable;
  if (!cuda::BestPath(weight_type, &best).ok()) return false;
  return path == Path::kPortable || best == Path::kHopper;
}

CudaOutcome RunCudaStep(const Problem& problem, const CudaOptions& options) {
  CudaOutcome outcome;
  if (const Result result = Runner(problem, options).Run(&outcome); !result.ok()) {
    outcome.error = result.message();
  }
  return outcome;
}

}  // namespace lossd::kernels::testing
