#include "kernels/cuda/losses/soft_rows.cuh"
#include "kernels/cuda/losses/soft_targets.h"

namespace lossd::kernels::cuda {
namespace {

template <Divergence kDivergence, class T>
__global__ void __launch_bounds__(kThreads)
    FinishSoftRowsKernel(const TileRows tile, int32_t first_row, const SoftTargets targets) {
  AwaitPreviousKernel();
  constexpr bool kExact = sizeof(T) == sizeof(float);
  // D is needed before the gradient.
  constexpr bool kThirdPass = kDivergence == Divergence::kJensenShannon;
  const int32_t row = first_row + static_cast<int32_t>(blockIdx.x);
  const RowLogits<kExact> logits = LogitsOf<kExact>(tile, targets, blockIdx.x, row);
  T* const gradients = GradientsOf<T>(targets, row);
  const float beta = targets.options.beta;
  const SoftPart whole = FindSoftPart<kDivergence>(tile, targets, logits, row);
  __shared__ EntryFactors shared_factors;
  RowEnd end{};
  if (threadIdx.x == 0) SetFactors<kDivergence>(tile, targets.options, row, whole, &shared_factors, &end);
  __syncthreads();
  EntryFactors factors = shared_factors;
  if (factors.overflowed) {
    ClearGradients(targets, gradients);
    if (threadIdx.x == 0) WriteOverflow(tile, row);
    return;
  }
  double parts[2] = {0, 0};
  double smoothing = 0;
  bool bad = false;
  if (kThirdPass || gradients == nullptr) {
    VisitEntries<kDivergence, kExact, true, false, T>(tile, logits, factors, beta, nullptr, parts,
                                                      &smoothing);
  } else {
    bad = VisitEntries<kDivergence, kExact, true, true, T>(tile, logits, factors, beta, gradients, parts,
                                                           &smoothing);
  }
  SoftTerms terms = TermsOfBlock<kDivergence>(parts, smoothing);
  double divergence = 0;
  if (threadIdx.x == 0) {
    divergence = AddLabel<kDivergence>(tile, targets.options, row, whole, &terms, &end);
    shared_factors.mean = static_cast<float>(end.mean);
  }
  if constexpr (kThirdPass) {
    __syncthreads();
    factors.mean = shared_factors.mean;
    if (gradients != nullptr) {
      bad = VisitEntries<kDivergence, kExact, false, true, T>(tile, logits, factors, beta, gradients, parts,
                                                              &smoothing);
    }
  }
  terms.bad = __syncthreads_or(bad ? 1 : 0) != 0 ? 1 : 0;
  if (threadIdx.x == 0) FinishSoftRow<kDivergence>(tile, targets.options, row, end, divergence, terms);
}

// Calls function(kernel) with the kernel for this divergence.
template <class T, class Function>
void WithKernel(Divergence divergence, Function function) {
  switch (divergence) {
    case Divergence::kForwardKl:
      return function(FinishSoftRowsKernel<Divergence::kForwardKl, T>);
    case Divergence::kReverseKl:
      return function(FinishSoftRowsKernel<Divergence::kReverseKl, T>);
    case Divergence::kJensenShannon:
      return function(FinishSoftRowsKernel<Divergence::kJensenShannon, T>);
  }
}

}  // namespace

Result FinishSoftRows(const TileRows& tile, int32_t first, int32_t rows, const SoftTargets& targets,
                      cudaStream_t stream) {
  Result result;
  WithType(tile.type, [&](auto type) {
    WithKernel<decltype(type)>(targets.options.divergence, [&](auto kernel) {
      result = LaunchRows("FinishSoftRows", {Blocks(rows, 1)}, tile, stream, kernel, first, targets);
    });
  });
  return result;
}

Result LoadSoftTargetKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&](auto type) {
    for (const Divergence divergence :
         {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJensenShannon}) {
      WithKernel<decltype(type)>(divergence, [&](auto kernel) { loader.Add(kernel); });
    }
  });
  return loader.result();
}

}  // namespace lossd::kernels::cuda
