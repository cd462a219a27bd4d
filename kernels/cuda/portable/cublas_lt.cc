#include "kernels/cuda/portable/cublas_lt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <utility>

namespace lossd::kernels::cuda {
namespace {

// The library has the toolkit's major version that this was compiled with; the interface changes with it.
constexpr char kLibrary[] = "libcublasLt.so.13";

cudaDataType_t LibraryType(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return CUDA_R_32F;
    case DataType::kBFloat16:
      return CUDA_R_16BF;
    case DataType::kFloat16:
      return CUDA_R_16F;
  }
  return CUDA_R_32F;
}

}  // namespace

struct CublasLt::Functions {
  struct CloseLibrary {
    void operator()(void* opened) const { dlclose(opened); }
  };

  std::unique_ptr<void, CloseLibrary> library;
  cublasLtHandle_t handle = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmulDescCreate) product_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) product_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) product_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) multiply = nullptr;

  template <class Function>
  bool Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library.get(), name));
    return *function != nullptr;
  }

  bool FindAll() {
    return Find("cublasLtCreate", &create) && Find("cublasLtDestroy", &destroy) &&
           Find("cublasLtMatmulDescCreate", &product_create) &&
           Find("cublasLtMatmulDescDestroy", &product_destroy) &&
           Find("cublasLtMatmulDescSetAttribute", &product_set) &&
           Find("cublasLtMatrixLayoutCreate", &layout_create) &&
           Find("cublasLtMatrixLayoutDestroy", &layout_destroy) &&
           Find("cublasLtMatmulPreferenceCreate", &preference_create) &&
           Find("cublasLtMatmulPreferenceDestroy", &preference_destroy) &&
           Find("cublasLtMatmulPreferenceSetAttribute", &preference_set) &&
           Find("cublasLtMatmulAlgoGetHeuristic", &heuristic) && Find("cublasLtMatmul", &multiply);
  }
};

CublasLt::CublasLt() : functions_(std::make_unique<Functions>()) {}

CublasLt::~CublasLt() {
  if (functions_->handle != nullptr) functions_->destroy(functions_->handle);
}

Result CublasLt::Open(std::unique_ptr<CublasLt>* library, std::string* why) {
  std::unique_ptr<CublasLt> opened(new CublasLt());
  Functions& f = *opened->functions_;
  f.library.reset(dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL));
  if (f.library == nullptr || !f.FindAll()) {
    const char* error = dlerror();
    if (why != nullptr) *why = error != nullptr ? error : kLibrary;
    return {cudaErrorSharedObjectInitFailed, "opening libcublasLt.so.13"};
  }
  if (f.create(&f.handle) != CUBLAS_STATUS_SUCCESS) return {cudaErrorUnknown, "cublasLtCreate"};
  *library = std::move(opened);
  return {};
}

Result CublasLt::Multiply(int64_t m, int64_t n, int64_t k, const BlasOperand& a, const BlasOperand& b,
                          void* c, DataType c_type, int64_t c_stride, const Factors& factors, void* workspace,
                          cudaStream_t stream) {
  // The library thinks in columns: it is asked for the transpose, cᵀ = bᵀ aᵀ, of which everything row-major
  // is the column-major form.
  const Functions& f = *functions_;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t left = nullptr;
  cublasLtMatrixLayout_t right = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasStatus_t status = f.product_create(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const auto step = [&status](cublasStatus_t next) {
    if (status == CUBLAS_STATUS_SUCCESS) status = next;
  };
  const cublasOperation_t left_operation = b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t right_operation = a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  step(f.product_set(product, CUBLASLT_MATMUL_DESC_TRANSA, &left_operation, sizeof(left_operation)));
  step(f.product_set(product, CUBLASLT_MATMUL_DESC_TRANSB, &right_operation, sizeof(right_operation)));
  const int32_t mode = factors.on_device ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
  step(f.product_set(product, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof(mode)));
  const auto layout = [&](cublasLtMatrixLayout_t* made, DataType type, int64_t rows, int64_t columns,
                          int64_t stride) {
    step(f.layout_create(made, LibraryType(type), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                         stride));
  };
  layout(&left, b.type, b.transposed ? k : n, b.transposed ? n : k, b.stride);
  layout(&right, a.type, a.transposed ? m : k, a.transposed ? k : m, a.stride);
  layout(&out, c_type, n, m, c_stride);
  step(f.preference_create(&preference));
  const auto workspace_bytes = static_cast<size_t>(kWorkspaceBytes);
  step(f.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                        sizeof(workspace_bytes)));
  cublasLtMatmulHeuristicResult_t chosen{};
  int found = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    step(f.heuristic(f.handle, product, left, right, out, out, preference, 1, &chosen, &found));
  }
  if (status == CUBLAS_STATUS_SUCCESS && found > 0) {
    step(f.multiply(f.handle, product, factors.alpha, b.data, left, a.data, right, factors.beta, c, out, c,
                    out, &chosen.algo, workspace, workspace_bytes, stream));
  }
  if (preference != nullptr) f.preference_destroy(preference);
  for (cublasLtMatrixLayout_t made : {left, right, out}) {
    if (made != nullptr) f.layout_destroy(made);
  }
  if (product != nullptr) f.product_destroy(product);
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return {cudaErrorMemoryAllocation, "a product of cublasLt"};
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) return {cudaErrorUnknown, "a product of cublasLt"};
  return {};
}

}  // namespace lossd::kernels::cuda
