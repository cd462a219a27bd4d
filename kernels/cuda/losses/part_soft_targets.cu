#include "kernels/cuda/losses/part_soft_targets.h"
#include "kernels/cuda/losses/soft_rows.cuh"

namespace lossd::kernels::cuda {
namespace {

// What all parts make of row i of those. Not inlined: kernels must come to the same bits, whatever would be
// fused in each.
template <Divergence kDivergence>
__device__ __noinline__ void MergeRow(const TileRows& tile, const Distillation& options,
                                      const SoftPieces& pieces, int32_t i, int32_t row, SoftPart* whole,
                                      EntryFactors* factors, RowEnd* end) {
  SoftPart parts[kMostParts];
  for (int32_t p = 0; p < pieces.parts; ++p) {
    parts[p] = pieces.found[static_cast<int64_t>(p) * pieces.rows + i];
  }
  *whole = MergeSoftParts(parts, pieces.parts, static_cast<double>(1.0f / options.temperature));
  SetFactors<kDivergence>(tile, options, row, *whole, factors, end);
}

__device__ SoftTerms WholeTermsOf(const SoftPieces& pieces, int32_t i) {
  SoftTerms terms[kMostParts];
  for (int32_t p = 0; p < pieces.parts; ++p)
    terms[p] = pieces.terms[static_cast<int64_t>(p) * pieces.rows + i];
  return MergeSoftTerms(terms, pieces.parts);
}

template <Divergence kDivergence>
__global__ void __launch_bounds__(kThreads)
    FindSoftPartsKernel(const TileRows tile, const SoftPartRows rows, const SoftTargets targets,
                        const SoftPieces pieces) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x);
  const int32_t row = rows.first + i;
  const RowLogits<false> logits = LogitsOf<false>(tile, targets, i, row);
  const SoftPart part = FindSoftPart<kDivergence>(tile, targets, logits, row);
  if (threadIdx.x == 0) pieces.found[static_cast<int64_t>(rows.part) * pieces.rows + i] = part;
}

template <Divergence kDivergence, class T>
__global__ void __launch_bounds__(kThreads)
    FindSoftTermsKernel(const __grid_constant__ TileRows tile, const SoftPartRows rows,
                        const __grid_constant__ SoftTargets targets,
                        const __grid_constant__ SoftPieces pieces) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x);
  const int32_t row = rows.first + i;
  const float beta = targets.options.beta;
  SoftTerms* const out = pieces.terms + static_cast<int64_t>(rows.part) * pieces.rows + i;
  T* const gradients = FormsAfterTerms(kDivergence) ? nullptr : GradientsOf<T>(targets, row);
  __shared__ EntryFactors factors;
  if (threadIdx.x == 0) {
    SoftPart whole;
    RowEnd end{};
    MergeRow<kDivergence>(tile, targets.options, pieces, i, row, &whole, &factors, &end);
  }
  __syncthreads();
  if (factors.overflowed) {
    ClearGradients(targets, gradients);
    if (threadIdx.x == 0) *out = {};
    return;
  }
  const RowLogits<false> logits = LogitsOf<false>(tile, targets, i, row);
  double parts[2] = {0, 0};
  double smoothing = 0;
  bool bad = false;
  if (gradients == nullptr) {
    VisitEntries<kDivergence, false, true, false, T>(tile, logits, factors, beta, nullptr, parts, &smoothing);
  } else {
    bad = VisitEntries<kDivergence, false, true, true, T>(tile, logits, factors, beta, gradients, parts,
                                                          &smoothing);
  }
  SoftTerms terms = TermsOfBlock<kDivergence>(parts, smoothing);
  terms.bad = __syncthreads_or(bad ? 1 : 0) != 0 ? 1 : 0;
  if (threadIdx.x == 0) *out = terms;
}

template <Divergence kDivergence, class T>
__global__ void __launch_bounds__(kThreads)
    FormSoftEntriesKernel(const __grid_constant__ TileRows tile, const SoftPartRows rows,
                          const __grid_constant__ SoftTargets targets,
                          const __grid_constant__ SoftPieces pieces) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x);
  const int32_t row = rows.first + i;
  int32_t* const out = pieces.bad + static_cast<int64_t>(rows.part) * pieces.rows + i;
  T* const gradients = GradientsOf<T>(targets, row);
  __shared__ EntryFactors factors;
  if (threadIdx.x == 0) {
    SoftPart whole;
    RowEnd end{};
    MergeRow<kDivergence>(tile, targets.options, pieces, i, row, &whole, &factors, &end);
    SoftTerms terms = WholeTermsOf(pieces, i);
    AddLabel<kDivergence>(tile, targets.options, row, whole, &terms, &end);
    factors.mean = static_cast<float>(end.mean);
  }
  __syncthreads();
  if (factors.overflowed) {
    ClearGradients(targets, gradients);
    if (threadIdx.x == 0) *out = 0;
    return;
  }
  const RowLogits<false> logits = LogitsOf<false>(tile, targets, i, row);
  double parts[2] = {0, 0};
  double smoothing = 0;
  const bool bad = VisitEntries<kDivergence, false, false, true, T>(
      tile, logits, factors, targets.options.beta, gradients, parts, &smoothing);
  const bool any_bad = __syncthreads_or(bad ? 1 : 0) != 0;
  if (threadIdx.x == 0) *out = any_bad ? 1 : 0;
}

constexpr int kFinishThreads = 128;

template <Divergence kDivergence>
__global__ void __launch_bounds__(kFinishThreads)
    FinishSoftPartsKernel(const __grid_constant__ TileRows tile, int32_t first,
                          const __grid_constant__ SoftTargets targets,
                          const __grid_constant__ SoftPieces pieces) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x * kFinishThreads + threadIdx.x);
  if (i >= pieces.rows) return;
  const int32_t row = first + i;
  SoftPart whole;
  EntryFactors factors{};
  RowEnd end{};
  MergeRow<kDivergence>(tile, targets.options, pieces, i, row, &whole, &factors, &end);
  if (factors.overflowed) return WriteOverflow(tile, row);
  SoftTerms terms = WholeTermsOf(pieces, i);
  const double divergence = AddLabel<kDivergence>(tile, targets.options, row, whole, &terms, &end);
  if (FormsAfterTerms(kDivergence) && tile.gradient_wanted) {
    for (int32_t p = 0; p < pieces.parts; ++p) {
      if (pieces.bad[static_cast<int64_t>(p) * pieces.rows + i] != 0) terms.bad = 1;
    }
  }
  FinishSoftRow<kDivergence>(tile, targets.options, row, end, divergence, terms);
}

// Calls function(tag) with the divergence as the type of the tag.
template <Divergence kValue>
struct DivergenceTag {
  static constexpr Divergence kDivergence = kValue;
};
template <class Function>
void WithDivergence(Divergence divergence, Function function) {
  switch (divergence) {
    case Divergence::kForwardKl:
      return function(DivergenceTag<Divergence::kForwardKl>());
    case Divergence::kReverseKl:
      return function(DivergenceTag<Divergence::kReverseKl>());
    case Divergence::kJensenShannon:
      return function(DivergenceTag<Divergence::kJensenShannon>());
  }
}

template <class Function>
void WithHalf(DataType type, Function function) {
  return type == DataType::kBFloat16 ? function(__nv_bfloat16()) : function(__half());
}

}  // namespace

Result FindSoftParts(const TileRows& tile, const SoftPartRows& rows, const SoftTargets& targets,
                     const SoftPieces& pieces, cudaStream_t stream) {
  Result result;
  WithDivergence(targets.options.divergence, [&](auto tag) {
    result = LaunchRows("FindSoftParts", {Blocks(pieces.rows, 1)}, tile, stream,
                        FindSoftPartsKernel<decltype(tag)::kDivergence>, rows, targets, pieces);
  });
  return result;
}

Result FindSoftTerms(const TileRows& tile, const SoftPartRows& rows, const SoftTargets& targets,
                     const SoftPieces& pieces, cudaStream_t stream) {
  Result result;
  WithHalf(tile.type, [&](auto type) {
    WithDivergence(targets.options.divergence, [&](auto tag) {
      result =
          LaunchRows("FindSoftTerms", {Blocks(pieces.rows, 1)}, tile, stream,
                     FindSoftTermsKernel<decltype(tag)::kDivergence, decltype(type)>, rows, targets, pieces);
    });
  });
  return result;
}

Result FormSoftEntries(const TileRows& tile, const SoftPartRows& rows, const SoftTargets& targets,
                       const SoftPieces& pieces, cudaStream_t stream) {
  Result result;
  WithHalf(tile.type, [&](auto type) {
    result =
        LaunchRows("FormSoftEntries", {Blocks(pieces.rows, 1)}, tile, stream,
                   FormSoftEntriesKernel<Divergence::kJensenShannon, decltype(type)>, rows, targets, pieces);
  });
  return result;
}

Result FinishSoftParts(const TileRows& tile, int32_t first, const SoftTargets& targets,
                       const SoftPieces& pieces, cudaStream_t stream) {
  Result result;
  WithDivergence(targets.options.divergence, [&](auto tag) {
    result = LaunchRows("FinishSoftParts", {Blocks(pieces.rows, kFinishThreads), kFinishThreads}, tile,
                        stream, FinishSoftPartsKernel<decltype(tag)::kDivergence>, first, targets, pieces);
  });
  return result;
}

Result LoadPartSoftTargetKernels(DataType weight_type) {
  KernelLoader loader;
  for (const Divergence divergence :
       {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJensenShannon}) {
    WithDivergence(divergence, [&](auto tag) {
      constexpr Divergence kDivergence = decltype(tag)::kDivergence;
      loader.Add(&FindSoftPartsKernel<kDivergence>);
      loader.Add(&FinishSoftPartsKernel<kDivergence>);
      WithHalf(weight_type, [&](auto type) {
        loader.Add(&FindSoftTermsKernel<kDivergence, decltype(type)>);
        if constexpr (FormsAfterTerms(kDivergence)) {
          loader.Add(&FormSoftEntriesKernel<kDivergence, decltype(type)>);
        }
      });
    });
  }
  return loader.result();
}

}  // namespace lossd::kernels::cuda
