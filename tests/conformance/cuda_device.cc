#include "server/engine/device/cuda/cuda_device.h"

#include "tests/conformance/device_under_test.h"

namespace lossd::engine::testing {
namespace {

template <CudaPath kPath>
absl::StatusOr<std::unique_ptr<Device>> Create(int64_t workspace_bytes) {
  return CreateCudaDevice(
      0, {.workspace_bytes = workspace_bytes,
          .chunk_limits = {.max_chunk_bytes = kMaxChunkBytes, .max_chunk_tokens = kMaxChunkTokens},
          .path = kPath});
}

}  // namespace

std::vector<DeviceUnderTest> DevicesUnderTest() {
  const auto gradient_error = [](kernels::DataType type) {
    return type == kernels::DataType::kFloat32 ? 1e-5 : type == kernels::DataType::kBFloat16 ? 4e-3 : 1e-3;
  };
  const auto only_fp32 = [](kernels::DataType type) { return type == kernels::DataType::kFloat32; };
  const auto always = [](kernels::DataType /*type*/) { return true; };
  return {{.name = "cuda",
           .create = &Create<CudaPath::kFastest>,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = only_fp32},
          {.name = "cudaPortable",
           .create = &Create<CudaPath::kPortable>,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = always}};
}

}  // namespace lossd::engine::testing
