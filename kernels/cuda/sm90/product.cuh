// One persistent, warp-specialised matrix product for Hopper: D[M, N] = A[M, K] B[K, N] with bf16 or fp16
// operands and fp32 sums that never leave the registers before the epilogue has them.
//
// One warp copies tiles of A and B into a ring of shared-memory stages; one or two warpgroups multiply
// them, each its own rows of a tile or each its own tiles in turn. Two blocks of a cluster, one below the
// other, share B.
//
// Every element of D is one chain of sums along k in steps of 16, whatever the sizes and the tile: its bits
// depend on its own row of A and column of B only.
#ifndef LOSSD_KERNELS_CUDA_SM90_PRODUCT_CUH_
#define LOSSD_KERNELS_CUDA_SM90_PRODUCT_CUH_

#include "kernels/cuda/rows/dependent_launch.cuh"
#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace lossd::kernels::cuda::sm90 {

// Whether two blocks, one below the other, form a cluster in which each copies half of B for both.
enum class Cluster { kNone, kPair };

// Whether the consumers share each tile's rows, or take whole tiles in turn: then one's epilogue runs while
// the other multiplies, for more bytes copied (a tile is as large as one warpgroup's registers allow).
enum class Schedule { kCooperative, kPingPong };

template <class T_, int kBlockM_, int kBlockN_, int kConsumers_, int kStages_, Schedule kSchedule_,
          Cluster kCluster_, Major kMajorA_, Major kMajorB_>
struct ProductTile {
  using T = T_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = 64;  // 128 bytes, the width of the swizzle
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kStages = kStages_;
  static constexpr Cluster kCluster = kCluster_;
  static constexpr Major kMajorA = kMajorA_;
  static constexpr Major kMajorB = kMajorB_;

  static constexpr int kBlocks = kCluster == Cluster::kNone ? 1 : 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kTurns = kSchedule_ == Schedule::kPingPong ? kConsumers : 1;
  static constexpr int kConsumersOfTile = kConsumers / kTurns;
  static constexpr int kRowsPerConsumer = kBlockM / kConsumersOfTile;
  static constexpr int kBands = kRowsPerConsumer / 64;  // products of 64 rows that a consumer makes
  static constexpr int kStageBytesA = kBlockM * kBlockK * 2;
  static constexpr int kStageBytesB = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kStageBytesA + kStageBytesB;
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024 + 8 * (2 * kStages + kConsumers);
  static_assert(kConsumers <= 2 && kBlockM % (64 * kConsumersOfTile) == 0 && kBlockN % 64 == 0 &&
                kSharedBytes <= 232448);

  // Boxes that the tensor maps of A and B must be made with: {inner, outer} elements.
  static constexpr int kBoxInner = 64;
  static constexpr int kBoxOuterA = kMajorA == Major::kK ? kBlockM : kBlockK;
  static constexpr int kBoxOuterB = (kMajorB == Major::kK ? kBlockN : kBlockK) / kBlocks;

  using Accumulators = float[kBands][kBlockN / 2];
};

// In tiles of the cluster. Tiles are taken in columns of `group` tiles of M, so that what a wave reads of A
// and B stays in the L2 cache.
struct ProductShape {
  int32_t m = 0;
  int32_t n = 0;
  int32_t k = 0;
  int32_t group = 1;
  const int32_t* device_m = nullptr;  // if set, the number of rows is read from here; m is the most
};

// Where a tile begins in D.
struct TileOrigin {
  int32_t row = 0;
  int32_t column = 0;
};

// Which tiles a block works on: every clusters-th, beginning with its own number.
template <class Tile>
class TileOrder {
 public:
  __device__ TileOrder(const ProductShape& shape, int32_t rows, uint32_t rank)
      : m_tiles_(Tiles(rows, Tile::kBlockM * Tile::kBlocks)),
        n_tiles_(Tiles(shape.n, Tile::kBlockN)),
        group_(shape.group),
        rank_(static_cast<int32_t>(rank)) {}

  __device__ int32_t first() const { return static_cast<int32_t>(blockIdx.x) / Tile::kBlocks; }
  __device__ int32_t step() const { return static_cast<int32_t>(gridDim.x) / Tile::kBlocks; }
  __device__ int32_t end() const { return m_tiles_ * n_tiles_; }
  __device__ TileOrigin At(int32_t index) const {
    const int32_t column = group_ * n_tiles_;
    const int32_t first = index / column * group_;
    const int32_t height = min(group_, m_tiles_ - first);
    const int32_t within = index % column;
    const int32_t m = (first + within % height) * Tile::kBlocks + rank_;
    return {m * Tile::kBlockM, within / height * Tile::kBlockN};
  }

 private:
  __device__ static int32_t Tiles(int32_t extent, int32_t tile) { return (extent + tile - 1) / tile; }

  int32_t m_tiles_;
  int32_t n_tiles_;
  int32_t group_;
  int32_t rank_;
};

// The ring of stages in shared memory.
template <class Tile>
struct Ring {
  uint32_t base = 0;      // of the first stage, 1024-byte aligned
  uint32_t barriers = 0;  // full ones, empty ones, one for each consumer's turn
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t a() const { return base + stage * Tile::kStageBytesA; }
  __device__ uint32_t b() const {
    return base + Tile::kStages * Tile::kStageBytesA + stage * Tile::kStageBytesB;
  }
  __device__ uint32_t full() const { return barriers + 8 * stage; }
  __device__ uint32_t empty() const { return barriers + 8 * (Tile::kStages + stage); }
  __device__ uint32_t turn(int32_t consumer) const { return barriers + 8 * (2 * Tile::kStages + consumer); }
  __device__ void Advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void Skip(int32_t stages) {
    stage += stages;
    parity ^= static_cast<uint32_t>(stage / Tile::kStages) & 1;
    stage %= Tile::kStages;
  }
};

// Copies one stage of an operand: its own half into both blocks of the cluster, where they share it.
template <Major kMajor, int kExtent, bool kShared>
__device__ void CopyOperand(uint32_t to, const CUtensorMap* map, int32_t first, int32_t k, uint32_t full,
                            uint32_t rank) {
  if constexpr (kMajor == Major::kK) {
    const int32_t half = kShared ? static_cast<int32_t>(rank) * (kExtent / 2) : 0;
    CopyBox<kShared>(to + half * 128, map, k, first + half, full);
  } else {
    const int32_t half = kShared ? static_cast<int32_t>(rank) * 32 : 0;
#pragma unroll
    for (int32_t column = 0; column < kExtent; column += 64) {
      CopyBox<kShared>(to + column / 64 * 8192 + half * 128, map, first + column, k + half, full);
    }
  }
}

template <Major kMajor>
__device__ inline uint64_t OperandDescriptor(uint32_t stage, int32_t offset) {
  if constexpr (kMajor == Major::kK) return MatrixDescriptor(stage + offset * 128, 16, 1024);
  return MatrixDescriptor(stage + offset / 64 * 8192, 8192, 1024);
}
// 16 further elements of k add this to a descriptor.
template <Major kMajor>
inline constexpr uint64_t kNextK16 = (kMajor == Major::kK ? 32 : 2048) >> 4;

template <class Tile>
__device__ void Produce(Ring<Tile> ring, const CUtensorMap* map_a, const CUtensorMap* map_b,
                        const TileOrder<Tile>& order, int32_t k_tiles, uint32_t rank) {
  ring.parity = 1;  // the stages are empty at first
  for (int32_t t = order.first(); t < order.end(); t += order.step()) {
    const TileOrigin tile = order.At(t);
    for (int32_t i = 0; i < k_tiles; ++i) {
      const int32_t k = i * Tile::kBlockK;
      Wait(ring.empty(), ring.parity);
      ArriveExpecting(ring.full(), Tile::kStageBytes);
      CopyOperand<Tile::kMajorA, Tile::kBlockM, false>(ring.a(), map_a, tile.row, k, ring.full(), rank);
      CopyOperand<Tile::kMajorB, Tile::kBlockN, Tile::kBlocks == 2>(ring.b(), map_b, tile.column, k,
                                                                    ring.full(), rank);
      ring.Advance();
    }
  }
  // A block must not end while its neighbour may still signal its barriers or copy into it.
  for (int32_t i = 0; i < Tile::kStages; ++i) {
    Wait(ring.empty(), ring.parity);
    ring.Advance();
  }
}

template <class Tile>
__device__ inline void Release(const Ring<Tile>& ring, uint32_t thread) {
  if (thread < Tile::kBlocks) ArriveAt(ring.empty(), thread);
}

// Keeps the compiler from moving uses of the sums across the asynchronous products.
template <class Tile>
__device__ inline void FenceSums(typename Tile::Accumulators& sums) {
#pragma unroll
  for (int band = 0; band < Tile::kBands; ++band) {
#pragma unroll
    for (int j = 0; j < Tile::kBlockN / 2; ++j) FenceOperand(sums[band][j]);
  }
}

// Multiplies all of k for one tile.
template <class Tile>
__device__ void MultiplyTile(Ring<Tile>& ring, typename Tile::Accumulators& sums, int32_t k_tiles,
                             int32_t first_row, uint32_t next_turn, uint32_t thread) {
  using Product = WarpgroupProduct<typename Tile::T, Tile::kBlockN, Tile::kMajorA, Tile::kMajorB>;
  Ring<Tile> previous = ring;
  for (int32_t i = 0; i < k_tiles; ++i) {
    Wait(ring.full(), ring.parity);
    FenceSums<Tile>(sums);
    WarpgroupFence();
    const uint64_t b = OperandDescriptor<Tile::kMajorB>(ring.b(), 0);
#pragma unroll
    for (int k = 0; k < Tile::kBlockK / 16; ++k) {
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band) {
        const uint64_t a = OperandDescriptor<Tile::kMajorA>(ring.a(), first_row + 64 * band);
        Product::Issue(sums[band], a + k * kNextK16<Tile::kMajorA>, b + k * kNextK16<Tile::kMajorB>, i + k);
      }
    }
    WarpgroupCommit();
    FenceSums<Tile>(sums);
    WarpgroupWait<1>();
    if (i > 0) Release(previous, thread);
    previous = ring;
    ring.Advance();
  }
  // Every warp for itself: what it hands on shows that it has had its own turn.
  if (Tile::kTurns > 1 && thread % 32 == 0) Arrive(next_turn);
  WarpgroupWait<0>();
  Release(previous, thread);
  FenceSums<Tile>(sums);
}

template <class Tile, class Epilogue>
__device__ void Consume(const Epilogue& epilogue, int32_t rows, Ring<Tile> ring, const ProductShape& shape,
                        const TileOrder<Tile>& order, int32_t k_tiles, uint32_t consumer, uint32_t thread) {
  const auto turn = static_cast<int32_t>(consumer) % Tile::kTurns;
  const int32_t next_turn = (turn + 1) % Tile::kTurns;
  const int32_t first_row = static_cast<int32_t>(consumer) / Tile::kTurns * Tile::kRowsPerConsumer;
  uint32_t parity = turn == 0 ? 1 : 0;  // the first consumer has its first turn at once
  ring.Skip(turn * k_tiles);
  for (int32_t t = order.first() + turn * order.step(); t < order.end(); t += Tile::kTurns * order.step()) {
    // A barrier of the ring tells a phase from its neighbours only: a consumer must not look at it before the
    // other one has come as far.
    if constexpr (Tile::kTurns > 1) Wait(ring.turn(turn), parity);
    parity ^= 1;
    const TileOrigin tile = order.At(t);
    typename Tile::Accumulators sums;
    MultiplyTile<Tile>(ring, sums, k_tiles, first_row, ring.turn(next_turn), thread);
    ring.Skip((Tile::kTurns - 1) * k_tiles);
    epilogue.template Store<Tile>(sums, tile.row + first_row, tile.column, rows, shape.n, thread);
  }
}

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                  const __grid_constant__ ProductShape shape, const __grid_constant__ Epilogue epilogue) {
  extern __shared__ uint8_t shared[];
  Ring<Tile> ring;
  ring.base = (SharedAddress(shared) + 1023) & ~1023U;
  ring.barriers = ring.base + Tile::kStages * Tile::kStageBytes;
  const uint32_t rank = Tile::kBlocks == 1 ? 0 : BlockInCluster();
  if (threadIdx.x == 0) {
    PrefetchMap(&map_a);
    PrefetchMap(&map_b);
    for (int32_t i = 0; i < Tile::kStages; ++i) {
      InitBarrier(ring.barriers + 8 * i, 1);
      InitBarrier(ring.barriers + 8 * (Tile::kStages + i), Tile::kConsumersOfTile * Tile::kBlocks);
    }
    for (int32_t i = 0; i < Tile::kConsumers; ++i) InitBarrier(ring.turn(i), 4);  // one for each warp
    FenceBarrierInit();
  }
  if constexpr (Tile::kBlocks == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }
  AwaitPreviousKernel();

  const int32_t rows = shape.device_m == nullptr ? shape.m : min(shape.m, *shape.device_m);
  const TileOrder<Tile> order(shape, rows, rank);
  const int32_t k_tiles = (shape.k + Tile::kBlockK - 1) / Tile::kBlockK;

  const uint32_t group = threadIdx.x / 128;
  if (group == 0) {
    if constexpr (Tile::kConsumers > 1) GiveRegisters<40>();
    if (threadIdx.x == 0) Produce<Tile>(ring, &map_a, &map_b, order, k_tiles, rank);
  } else {
    if constexpr (Tile::kConsumers > 1) TakeRegisters<232>();
    const uint32_t thread = threadIdx.x % 128;
    Consume<Tile>(epilogue, rows, ring, shape, order, k_tiles, group - 1, thread);
  }
}

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_PRODUCT_CUH_
