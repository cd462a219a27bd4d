#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/rows/row_kernels.cuh"
#include "kernels/optimizer_rule.h"

namespace lossd::kernels::cuda {
namespace {

// A thread reads four neighbouring elements at a time, so that a warp's loads are whole lines, and one such
// quad of everything before it uses any. On an H200, AdamW with V=131072 and H=4096 takes 1.077 of the time
// that copying as many bytes takes; with two quads it is 1.096.
constexpr int kQuad = 4;
constexpr int kQuads = 1;
constexpr int kStep = kThreads * kQuad;  // elements from a thread's quad to its next one
constexpr int64_t kPass = int64_t{kStep} * kQuads;
// Blocks, and so partial sums, whatever the device: the order of sums follows from the sizes.
constexpr int64_t kMostBlocks = 16384;
// Two for each multiprocessor, where copy engines want the memory at the same time: with as many as fit, they
// bring 2 GiB over NVLink in 6.3 ms on an H200, with 264 in 5.8, with 66 in 7.7.
constexpr int64_t kBlocksBesideCopies = 264;

struct Partial {
  double squares;
  float largest;
  float largest_weight;
  int64_t non_finite;
};

// The division of the elements, padding included, among blocks.
struct Walk {
  int64_t passes;     // of all blocks
  int64_t per_block;  // the last one may have fewer
  // A step of kStep elements in rows and columns.
  int64_t rows_on;
  int64_t columns_on;
};

Walk WalkOver(const PaddedRows& shape) {
  const int64_t passes = CeilDivide(shape.rows * shape.stride, kPass);
  return {passes, CeilDivide(passes, kMostBlocks), kStep / shape.stride, kStep % shape.stride};
}

unsigned BlocksOf(const Walk& walk) { return Blocks(walk.passes, walk.per_block); }

// Some of the blocks of a walk: who is launched takes one after the other.
struct BlockSpan {
  int64_t first;
  int64_t end;
};

BlockSpan AllBlocks(const Walk& walk) { return {0, BlocksOf(walk)}; }

BlockSpan BlocksOf(const Walk& walk, const Parts& parts) {
  const int64_t all = BlocksOf(walk);
  return {all * parts.first / parts.of, all * parts.end / parts.of};
}

// kDense: whole passes, of which every element counts, and the gradient is dW alone. kPlaced: rows end, or
// smoothing wants to know where an element is. kSingle: the same, where four elements may not be read at
// once. An element is the same thread's in all of them, so sums have the same bits.
enum class Layout { kDense, kPlaced, kSingle };
constexpr Layout kLayouts[] = {Layout::kDense, Layout::kPlaced, Layout::kSingle};

bool AllAligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0;
  });
}

Layout LayoutOf(const PaddedRows& shape, const GradientRows& gradient) {
  if (!AllAligned({gradient.values})) return Layout::kSingle;
  const bool smoothed = gradient.values != nullptr &&
                        (gradient.uniform_smoothing != nullptr || gradient.weighted_smoothing != nullptr);
  const bool dense = shape.columns == shape.stride && shape.rows * shape.stride % kPass == 0;
  return dense && !smoothed ? Layout::kDense : Layout::kPlaced;
}

Layout LayoutOf(const StepTensor& tensor) {
  const bool aligned = AllAligned({tensor.weight, tensor.master, tensor.first_moment, tensor.second_moment});
  return aligned ? LayoutOf(tensor.shape, tensor.gradient) : Layout::kSingle;
}

// Four neighbouring elements: their place, and how many of them count.
struct Quad {
  int64_t index;
  int64_t row;
  int64_t column;
  int valid;
};

// A thread's way through its block's elements.
template <Layout kLayout>
class Walker {
 public:
  __device__ Walker(const PaddedRows& shape, const Walk& walk) : Walker(shape, walk, blockIdx.x) {}
  __device__ Walker(const PaddedRows& shape, const Walk& walk, int64_t block)
      : shape_(shape),
        walk_(walk),
        block_(block),
        index_(block_ * walk.per_block * kPass + threadIdx.x * kQuad) {
    if constexpr (kLayout != Layout::kDense) {
      row_ = index_ / shape.stride;
      column_ = index_ - row_ * shape.stride;
    }
  }

  // The passes of the block.
  __device__ int64_t Passes() const {
    const int64_t left = walk_.passes - block_ * walk_.per_block;
    return left < walk_.per_block ? left : walk_.per_block;
  }

  // The quad here; then moves on.
  __device__ Quad Next() {
    Quad quad{index_, row_, column_, kQuad};
    if constexpr (kLayout != Layout::kDense) {
      const int64_t left = row_ < shape_.rows ? shape_.columns - column_ : 0;
      quad.valid = left >= kQuad ? kQuad : left > 0 ? static_cast<int>(left) : 0;
      row_ += walk_.rows_on;
      column_ += walk_.columns_on;
      if (column_ >= shape_.stride) {
        column_ -= shape_.stride;
        ++row_;
      }
    }
    index_ += kStep;
    return quad;
  }

 private:
  const PaddedRows& shape_;
  const Walk& walk_;
  const int64_t block_;
  int64_t index_;
  int64_t row_ = 0;
  int64_t column_ = 0;
};

// Plain loads and stores, though everything is read once and written once: with streaming hints two quads
// took 1.148 of the copy's time on the H200, without them 1.096.
__device__ void LoadWhole(const float* from, float (&to)[kQuad]) {
  const float4 in = *reinterpret_cast<const float4*>(from);
  to[0] = in.x;
  to[1] = in.y;
  to[2] = in.z;
  to[3] = in.w;
}
__device__ void StoreWhole(const float (&from)[kQuad], float* to) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

template <class T>
struct alignas(8) Narrow {
  T values[kQuad];
};
template <class T>
__device__ void LoadWhole(const T* from, float (&to)[kQuad]) {
  static_assert(sizeof(T) == 2);
  const uint2 in = *reinterpret_cast<const uint2*>(from);
  Narrow<T> narrow;
  memcpy(&narrow, &in, sizeof(in));
#pragma unroll
  for (int i = 0; i < kQuad; ++i) to[i] = Widen(narrow.values[i]);
}
template <class T>
__device__ void StoreWhole(const float (&from)[kQuad], T* to) {
  static_assert(sizeof(T) == 2);
  Narrow<T> narrow;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) narrow.values[i] = static_cast<T>(from[i]);
  uint2 out;
  memcpy(&out, &narrow, sizeof(out));
  *reinterpret_cast<uint2*>(to) = out;
}

// Elements that do not count are 0.
template <Layout kLayout, class T>
__device__ void Load(const T* from, const Quad& quad, float (&to)[kQuad]) {
  if (kLayout != Layout::kSingle && quad.valid == kQuad) return LoadWhole(from + quad.index, to);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    to[i] = 0.0f;
    if (kLayout != Layout::kDense && i < quad.valid) to[i] = Widen(from[quad.index + i]);
  }
}
template <Layout kLayout, class T>
__device__ void Store(const float (&from)[kQuad], const Quad& quad, T* to) {
  if (kLayout != Layout::kSingle && quad.valid == kQuad) return StoreWhole(from, to + quad.index);
  if constexpr (kLayout != Layout::kDense) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i < quad.valid) to[quad.index + i] = static_cast<T>(from[i]);
    }
  }
}

template <Layout kLayout>
__device__ void LoadGradient(const GradientRows& rows, const Quad& quad, float (&to)[kQuad]) {
  if (rows.values == nullptr) {
#pragma unroll
    for (float& value : to) value = 0.0f;
    return;
  }
  Load<kLayout>(rows.values, quad, to);
  if constexpr (kLayout != Layout::kDense) {
    if (rows.uniform_smoothing != nullptr) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (i < quad.valid) to[i] = to[i] - rows.uniform_smoothing[quad.column + i];
      }
    }
    if (rows.weighted_smoothing != nullptr && quad.valid > 0) {
      const float weight = rows.class_weights[quad.row];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (i < quad.valid) to[i] = to[i] - weight * rows.weighted_smoothing[quad.column + i];
      }
    }
  }
}

__device__ float Infinity() { return __int_as_float(0x7F800000); }

class Tally {
 public:
  __device__ void Add(float gradient) {
    squares_ = fma(static_cast<double>(gradient), static_cast<double>(gradient), squares_);
    const float magnitude = fabsf(gradient);
    const bool finite = magnitude < Infinity();
    largest_ = fmaxf(largest_, finite ? magnitude : 0.0f);
    non_finite_ += finite ? 0 : 1;
  }
  __device__ void AddWeight(float weight) {
    const float magnitude = fabsf(weight);
    largest_weight_ = fmaxf(largest_weight_, magnitude < Infinity() ? magnitude : Infinity());
  }
  __device__ void AddBias(float bias) { largest_weight_ = fmaxf(largest_weight_, ShiftOf(bias)); }
  __device__ void Write(Partial* to) const {
    Partial partial;
    partial.squares = SumOfBlock(squares_);
    partial.largest = MaximumOfBlock(largest_);
    partial.largest_weight = MaximumOfBlock(largest_weight_);
    partial.non_finite = static_cast<int64_t>(SumOfBlock(static_cast<double>(non_finite_)));
    if (threadIdx.x == 0) *to = partial;
  }

 private:
  double squares_ = 0;
  float largest_ = 0;
  float largest_weight_ = 0;
  int32_t non_finite_ = 0;
};

template <class T>
__device__ float Rounded(float value) {
  return Widen(static_cast<T>(value));
}

enum class Master { kNone, kKept };

template <class T, int kMoments, Master kMaster, Layout kLayout>
__global__ void __launch_bounds__(kThreads)
    StepKernel(const StepTensor tensor, const OptimizerCoefficients c, const Walk walk, Partial* partials) {
  T* const weight = static_cast<T*>(tensor.weight);
  Walker<kLayout> walker(tensor.shape, walk);
  Tally tally;
  const int64_t passes = walker.Passes();
  for (int64_t pass = 0; pass < passes; ++pass) {
    Quad quads[kQuads];
    float g[kQuads][kQuad];
    float w[kQuads][kQuad];
    float first[kQuads][kQuad] = {};
    float second[kQuads][kQuad] = {};
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const Quad quad = quads[q] = walker.Next();
      LoadGradient<kLayout>(tensor.gradient, quad, g[q]);
      if constexpr (kMaster == Master::kKept) {
        Load<kLayout>(tensor.master, quad, w[q]);
      } else {
        Load<kLayout>(weight, quad, w[q]);
      }
      if constexpr (kMoments > 0) Load<kLayout>(tensor.first_moment, quad, first[q]);
      if constexpr (kMoments > 1) Load<kLayout>(tensor.second_moment, quad, second[q]);
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const Quad quad = quads[q];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (i >= quad.valid) continue;
        const float gradient = c.scale * g[q][i];
        tally.Add(gradient);
        w[q][i] = UpdatedWeight<kMoments>(c, gradient, w[q][i], first[q][i], second[q][i]);
        if (sizeof(T) == sizeof(float) && tensor.is_bias) {
          tally.AddBias(w[q][i]);
        } else {
          tally.AddWeight(Rounded<T>(w[q][i]));
        }
      }
      if constexpr (kMoments > 0) Store<kLayout>(first[q], quad, tensor.first_moment);
      if constexpr (kMoments > 1) Store<kLayout>(second[q], quad, tensor.second_moment);
      if constexpr (kMaster == Master::kKept) Store<kLayout>(w[q], quad, tensor.master);
      Store<kLayout>(w[q], quad, weight);
    }
  }
  tally.Write(partials + blockIdx.x);
}

// What is tallied: the gradient as it is, or what becomes of another one to which it is added.
enum class Tallied { kGradient, kSum };

template <Layout kLayout, Tallied kTallied>
__global__ void __launch_bounds__(kThreads)
    TallyKernel(const PaddedRows shape, const GradientRows gradient, float* sum, float scale, const Walk walk,
                const BlockSpan blocks, Partial* partials) {
  for (int64_t block = blocks.first + blockIdx.x; block < blocks.end; block += gridDim.x) {
    Walker<kLayout> walker(shape, walk, block);
    Tally tally;
    const int64_t count = walker.Passes() * kQuads;
#pragma unroll 4
    for (int64_t done = 0; done < count; ++done) {
      const Quad quad = walker.Next();
      float g[kQuad];
      LoadGradient<kLayout>(gradient, quad, g);
      if constexpr (kTallied == Tallied::kSum) {
        float more[kQuad];
        Load<kLayout>(sum, quad, more);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) g[i] = more[i] + g[i];
        Store<kLayout>(g, quad, sum);
      }
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (i < quad.valid) tally.Add(scale * g[i]);
      }
    }
    tally.Write(partials + block);
  }
}

__global__ void __launch_bounds__(kThreads)
    GatherGradientKernel(const PaddedRows shape, const GradientRows gradient, const Walk walk, float* to) {
  Walker<Layout::kPlaced> walker(shape, walk);
  const int64_t passes = walker.Passes();
  for (int64_t pass = 0; pass < passes; ++pass) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const Quad quad = walker.Next();
      float g[kQuad];
      LoadGradient<Layout::kPlaced>(gradient, quad, g);
      Store<Layout::kPlaced>(g, quad, to);
    }
  }
}

// One block. Each thread's partial sums, and then the threads', in order.
__global__ void FinishTallyKernel(const Partial* partials, int32_t count, GradientTally* tally,
                                  float* largest_weight) {
  double squares = 0;
  double non_finite = 0;
  float largest = 0;
  float weight = 0;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
    const Partial partial = partials[i];
    squares += partial.squares;
    non_finite += static_cast<double>(partial.non_finite);
    largest = fmaxf(largest, partial.largest);
    weight = fmaxf(weight, partial.largest_weight);
  }
  squares = SumOfBlock(squares);
  non_finite = SumOfBlock(non_finite);
  largest = MaximumOfBlock(largest);
  weight = MaximumOfBlock(weight);
  if (threadIdx.x != 0) return;
  tally->squares = squares;
  tally->largest = largest;
  tally->non_finite = static_cast<int64_t>(non_finite);
  if (largest_weight != nullptr) *largest_weight = weight;
}

__global__ void __launch_bounds__(kThreads)
    AddGradientKernel(const float* from, int64_t count, bool overwrite, float* to) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kStep;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kQuad; i < count;
       i += step) {
    const int64_t left = count - i;
    const Quad quad{i, 0, 0, left >= kQuad ? kQuad : static_cast<int>(left)};
    float sum[kQuad] = {};
    float more[kQuad];
    if (!overwrite) Load<Layout::kPlaced>(to, quad, sum);
    Load<Layout::kPlaced>(from, quad, more);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) sum[k] = sum[k] + more[k];
    Store<Layout::kPlaced>(sum, quad, to);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) NarrowKernel(const float* master, int64_t count, T* weight) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kStep;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kQuad; i < count;
       i += step) {
    const int64_t left = count - i;
    const Quad quad{i, 0, 0, left >= kQuad ? kQuad : static_cast<int>(left)};
    float values[kQuad];
    Load<Layout::kPlaced>(master, quad, values);
    Store<Layout::kPlaced>(values, quad, weight);
  }
}

unsigned GridOver(int64_t count) {
  return std::min(Blocks(count, kStep), static_cast<unsigned>(kMostBlocks));
}

// Dispatch

using StepFunction = void(StepTensor, OptimizerCoefficients, Walk, Partial*);

template <class T, Master kMaster, Layout kLayout>
StepFunction* StepFor(int moments) {
  if (moments == 0) return &StepKernel<T, 0, kMaster, kLayout>;
  if (moments == 1) return &StepKernel<T, 1, kMaster, kLayout>;
  return &StepKernel<T, 2, kMaster, kLayout>;
}

template <class T, Master kMaster>
StepFunction* StepFor(int moments, Layout layout) {
  if constexpr (sizeof(T) == 4) {  // of a bias
    if (layout == Layout::kSingle) return StepFor<T, kMaster, Layout::kSingle>(moments);
  }
  return layout == Layout::kDense ? StepFor<T, kMaster, Layout::kDense>(moments)
                                  : StepFor<T, kMaster, Layout::kPlaced>(moments);
}

template <class T>
StepFunction* StepFor(int moments, Master master, Layout layout) {
  if constexpr (sizeof(T) == 2) {
    if (master == Master::kKept) return StepFor<T, Master::kKept>(moments, layout);
  }
  return StepFor<T, Master::kNone>(moments, layout);
}

using TallyFunction = void(PaddedRows, GradientRows, float*, float, Walk, BlockSpan, Partial*);

template <Tallied kTallied>
TallyFunction* TallyFor(Layout layout) {
  switch (layout) {
    case Layout::kDense:
      return &TallyKernel<Layout::kDense, kTallied>;
    case Layout::kPlaced:
      return &TallyKernel<Layout::kPlaced, kTallied>;
    case Layout::kSingle:
      break;
  }
  return &TallyKernel<Layout::kSingle, kTallied>;
}

Result FinishTally(const Partial* partials, unsigned count, GradientTally* tally, float* largest_weight,
                   cudaStream_t stream) {
  FinishTallyKernel<<<1, kThreads, 0, stream>>>(partials, static_cast<int32_t>(count), tally, largest_weight);
  return {cudaGetLastError(), "FinishTally"};
}

}  // namespace

int64_t TallyScratchBytes() { return kMostBlocks * static_cast<int64_t>(sizeof(Partial)); }

Result ApplyOptimizer(const StepTensor& tensor, const OptimizerCoefficients& coefficients, void* scratch,
                      GradientTally* tally, cudaStream_t stream) {
  const Walk walk = WalkOver(tensor.shape);
  const Layout layout = LayoutOf(tensor);
  const Master master = tensor.master == nullptr ? Master::kNone : Master::kKept;
  auto* const partials = static_cast<Partial*>(scratch);
  WithType(tensor.weight_type, [&](auto element) {
    StepFunction* const kernel = StepFor<decltype(element)>(coefficients.moments, master, layout);
    kernel<<<BlocksOf(walk), kThreads, 0, stream>>>(tensor, coefficients, walk, partials);
  });
  LOSSD_CUDA_PASS_ON(Result(cudaGetLastError(), "ApplyOptimizer"));
  return FinishTally(partials, BlocksOf(walk), tally, tensor.largest_weight, stream);
}

Result TallyGradient(const PaddedRows& shape, const GradientRows& gradient, float scale, void* scratch,
                     GradientTally* tally, cudaStream_t stream) {
  const Walk walk = WalkOver(shape);
  auto* const partials = static_cast<Partial*>(scratch);
  TallyFunction* const kernel = TallyFor<Tallied::kGradient>(LayoutOf(shape, gradient));
  kernel<<<BlocksOf(walk), kThreads, 0, stream>>>(shape, gradient, nullptr, scale, walk, AllBlocks(walk),
                                                  partials);
  LOSSD_CUDA_PASS_ON(Result(cudaGetLastError(), "TallyGradient"));
  return FinishTally(partials, BlocksOf(walk), tally, nullptr, stream);
}

ElementSpan ElementsOf(const PaddedRows& shape, const Parts& parts) {
  const Walk walk = WalkOver(shape);
  const BlockSpan blocks = BlocksOf(walk, parts);
  const auto first = [&](int64_t block) {
    return std::min(block * walk.per_block * kPass, shape.rows * shape.stride);
  };
  return {first(blocks.first), first(blocks.end) - first(blocks.first)};
}

Result AddAndTally(const PaddedRows& shape, const Parts& parts, const float* gradient, float scale,
                   float* sum, void* scratch, GradientTally* tally, cudaStream_t stream) {
  const Walk walk = WalkOver(shape);
  const BlockSpan blocks = BlocksOf(walk, parts);
  const GradientRows rows{.values = gradient};
  const Layout layout = AllAligned({sum}) ? LayoutOf(shape, rows) : Layout::kSingle;
  auto* const partials = static_cast<Partial*>(scratch);
  if (blocks.end > blocks.first) {
    const auto grid = static_cast<unsigned>(std::min(blocks.end - blocks.first, kBlocksBesideCopies));
    TallyFor<Tallied::kSum>(layout)<<<grid, kThreads, 0, stream>>>(shape, rows, sum, scale, walk, blocks,
                                                                   partials);
    LOSSD_CUDA_PASS_ON(Result(cudaGetLastError(), "AddAndTally"));
  }
  if (parts.end < parts.of) return {};
  return FinishTally(partials, BlocksOf(walk), tally, nullptr, stream);
}

Result GatherGradient(const PaddedRows& shape, const GradientRows& gradient, float* to, cudaStream_t stream) {
  const Walk walk = WalkOver(shape);
  GatherGradientKernel<<<BlocksOf(walk), kThreads, 0, stream>>>(shape, gradient, walk, to);
  return {cudaGetLastError(), "GatherGradient"};
}

Result AddGradient(const float* from, int64_t count, WeightGradient store, float* to, cudaStream_t stream) {
  AddGradientKernel<<<GridOver(count), kThreads, 0, stream>>>(from, count,
                                                              store == WeightGradient::kOverwrite, to);
  return {cudaGetLastError(), "AddGradient"};
}

Result NarrowMaster(const float* master, DataType weight_type, void* weight, int64_t count,
                    cudaStream_t stream) {
  WithType(weight_type, [&](auto element) {
    using T = decltype(element);
    NarrowKernel<<<GridOver(count), kThreads, 0, stream>>>(master, count, static_cast<T*>(weight));
  });
  return {cudaGetLastError(), "NarrowMaster"};
}

Result LoadOptimizerKernels(DataType weight_type) {
  KernelLoader loader;
  const auto add_steps = [&loader](auto element, Master master) {
    for (int moments = 0; moments <= 2; ++moments) {
      for (const Layout layout : kLayouts) {
        loader.Add(StepFor<decltype(element)>(moments, master, layout));
      }
    }
  };
  WithType(weight_type, [&](auto element) {
    add_steps(element, Master::kNone);
    if (sizeof(element) == 2) add_steps(element, Master::kKept);
    loader.Add(&NarrowKernel<decltype(element)>);
  });
  add_steps(float(), Master::kNone);  // of the bias
  for (const Layout layout : kLayouts) {
    loader.Add(TallyFor<Tallied::kGradient>(layout));
    loader.Add(TallyFor<Tallied::kSum>(layout));
  }
  loader.Add(&GatherGradientKernel);
  loader.Add(&FinishTallyKernel);
  loader.Add(&AddGradientKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
