// One head on a CUDA device: weights and gradient in its memory, kernels/cuda for the arithmetic.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_BACKEND_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_BACKEND_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/portable/cublas_lt.h"
#include "kernels/cuda/sharded_step.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/cuda/cuda_pipeline.h"
#include "server/engine/device/cuda/peer_gradients.h"
#include "server/engine/device/cuda/slice_pipeline.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/head_shard.h"
#include "server/engine/device/optimizer_state.h"

namespace lossd::engine {

// The tally of dW and that of db.
using CudaTallies = std::array<kernels::GradientTally, 2>;
// The kernels sum over all rows at once: all of it is in the first segment.
GradientTallies WholeOf(const CudaTallies& tallies);
// What making them takes of the device, with room for them.
int64_t TallyBytes();
// Where in that memory, which begins with scratch memory for making them, they are.
kernels::GradientTally* TalliesIn(const kernels::cuda::DeviceBuffer& buffer);

// What heads of one device share; it outlives them.
struct SharedCuda {
  int index = 0;
  int64_t workspace_bytes = 0;                // that steps may use, equally many at all ranks
  kernels::cuda::DeviceBuffer workspace;      // the computing stream's
  kernels::cuda::DeviceBuffer tallies;        // the same; TallyBytes
  kernels::cuda::ShardStreams shard_streams;  // if there are ranks
  // Held while a user of the workspace puts its work on that stream: a batch, and a head that is created by
  // another thread, must not come between each other's.
  Mutex workspace_turn;
  CudaPipeline pipeline;
  std::unique_ptr<kernels::cuda::CublasLt> library;  // null if it is not there
  std::string why_no_library;
};

struct CudaGradient : Gradient {
  // What label smoothing adds, for one C: dw lacks -C_v t_h.
  struct Smoothing {
    kernels::cuda::DeviceBuffer t;
    bool empty = true;  // once everything that was enqueued has run
  };

  kernels::cuda::DeviceBuffer dw;  // fp32 [V, padded H]
  kernels::cuda::DeviceBuffer db;  // fp32 [V]; empty without a bias
  bool empty = true;               // the same
  std::array<Smoothing, 2> smoothings;
  int64_t number = 0;  // no other gradient of this process has it, now or later

  static kernels::cuda::Result Create(const HeadConfig& config, CudaGradient* gradient);
  static int64_t PlanBytes(const HeadConfig& config);
  int64_t bytes() const;
};

class CudaBackend : public HeadBackend {
 public:
  // `config` is of the shard's rows, but for class weights.
  CudaBackend(HeadConfig config, const HeadShard& shard, SharedCuda* device, kernels::cuda::Path path);
  ~CudaBackend() override;

  // Takes the memory, and has everything loaded that batches will run, so that none of them needs more;
  // before anything else. Any thread's.
  kernels::cuda::Result Allocate();

  absl::Status PublishWeights(WeightBuffers staged) override;
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override;
  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override;
  absl::Status BlendWeights(const HeadBackend& source, double decay) override;
  absl::Status CopyOptimizer(const HeadBackend& source) override;
  absl::Status Logits(const LogitRows& rows) override;
  int64_t RowsOfLogits() const override;
  absl::Status PrepareTeacher(const HeadBackend& teacher) override;
  int64_t RowsPerBatch(const BatchKey& kind) const override;
  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks, BatchCallbacks callbacks) override;
  absl::Status ReadGradient(const Gradient* gradient, int64_t first_row, int64_t rows, float* out) override;
  absl::Status ReadBiasGradient(const Gradient* gradient, int64_t first_row, int64_t rows,
                                float* out) override;
  void Reset(Gradient* gradient) override;
  absl::Status Fold(Gradient* from, Gradient* to) override;
  absl::StatusOr<GradientTallies> Summarize(const Gradient* gradient, double scale) override;
  absl::StatusOr<GradientTallies> ApplyStep(const Gradient* gradient,
                                            const StepArguments& arguments) override;
  absl::Status SumSlices(Gradient* gradient, const ReplicaCommunicators& replicas) override;
  absl::Status AddToSum(Gradient* gradient, int32_t replica, const ReplicaCommunicators& replicas) override;
  absl::StatusOr<GradientTallies> TallySum(double scale, const ReplicaCommunicators& replicas) override;
  absl::Status StepSlices(const StepArguments& arguments) override;
  absl::Status GatherSlices(const ReplicaCommunicators& replicas) override;
  absl::Status ReadSum(int64_t first_row, int64_t rows, float* out) override;
  absl::Status ReadBiasSum(int64_t first_row, int64_t rows, float* out) override;
  std::vector<StateTensor> StateTensors() const override { return StateTensorsOf(config_); }
  absl::Status ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) override;
  absl::Status WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                          const void* in) override;
  absl::Status RestoreState() override;
  absl::StatusOr<CopyDone> CopyState(std::span<const StateCopy> copies) override;
  absl::Status WriteGradient(Gradient* gradient, int64_t first_row, int64_t rows, const float* dw,
                             const float* bias) override;
  bool HasRoomForList(int64_t tokens) const override;
  bool Holds() const override { return holds_.has_value(); }
  MemoryPlan MemoryReport() const override;
  // What a head takes, as MemoryReport says it: what is made of its class weights and of its bias is among
  // weights and gradient.
  static MemoryPlan PlanMemory(const HeadConfig& config, const HeadShard& shard, kernels::cuda::Path path);

 private:
  // For which C there is what label smoothing needs: the same for all entries, or the head's class weights.
  static constexpr size_t kUniform = 0;
  static constexpr size_t kWeighted = 1;

  bool frozen() const { return config_.weight_gradients == WeightGradients::kFrozen; }
  bool UsesClassWeights(const BatchKey& kind) const {
    return kind.class_weights == ClassWeights::kUse && config_.class_weights != nullptr;
  }
  // Whether the batch takes the step over segments. One GPU computes soft targets of a teacher that goes by
  // cuBLAS, which cannot lie over several, with whole products: those are loaded.
  bool InSegments(const BatchKey& kind) const {
    const bool by_library =
        kind.teacher.backend != nullptr && ShapeOf(kind.teacher).path != kernels::cuda::Path::kHopper;
    if (kind.lists.use == ChunkLists::Use::kKept) return false;  // gathered products know none
    return !shard_.whole() || (kind.segments == kernels::Segments::kFixed && !by_library);
  }
  bool UsesBias(const BatchKey& kind) const { return kind.bias == Bias::kUse && config_.bias; }
  // What one row with soft targets of such a teacher takes of the workspace, whichever segments there are.
  int64_t BytesForTeacher(const kernels::cuda::TeacherShape& teacher) const;
  // C of this head's rows; null: 1.
  const float* ClassWeightRows() const;
  // Whether batches in two phases hold what they can.
  static bool CanHold(const HeadConfig& config, const HeadShard& shard, kernels::cuda::Path path);
  kernels::cuda::Result AllocateHold();
  kernels::cuda::Result AllocateBias();
  kernels::cuda::Result AllocateSmoothing();
  kernels::cuda::Result AllocateOptimizer();
  kernels::cuda::Result AllocateSlices();
  CudaGradient& Find(Gradient* gradient) {
    return gradient == nullptr ? own_ : *static_cast<CudaGradient*>(gradient);
  }
  const CudaGradient& Find(const Gradient* gradient) const {
    return gradient == nullptr ? own_ : *static_cast<const CudaGradient*>(gradient);
  }
  static float* Floats(const kernels::cuda::DeviceBuffer& buffer) {
    return static_cast<float*>(buffer.data());
  }
  kernels::cuda::Result SubtractSmoothing(const CudaGradient& gradient, int64_t first_row, int64_t rows,
                                          float* out) const;
  bool over_replicas() const { return shard_.replicas > 1; }
  kernels::RowSpan AllRows() const { return {0, config_.vocab_size}; }
  int64_t WeightRowBytes() const;
  int64_t GradientRowBytes() const;
  // How rows lie in the device's memory: a row's bytes, and those from one to the next.
  struct RowBytes {
    int64_t stride = 0;
    int64_t row = 0;
  };
  RowBytes MatrixBytes(kernels::DataType type) const;
  static constexpr RowBytes kBiasBytes = {sizeof(float), sizeof(float)};
  char* WeightRow(int64_t row) const { return static_cast<char*>(weights_.data()) + row * WeightRowBytes(); }

  kernels::cuda::Result Publish(const WeightBuffers& staged);
  // Weights of all rows, and masters of those that are stepped here, of a whole master.
  kernels::cuda::Result WriteMaster(const kernels::RowSpan& all, const void* master);
  kernels::cuda::Result NarrowMaster();
  // Those of a decay of 0, and above.
  kernels::cuda::Result CopyWeights(const CudaBackend& source);
  kernels::cuda::Result Blend(const CudaBackend& source, double decay);
  // Everything that is made of weights and of the bias, once they have changed.
  kernels::cuda::Result DeriveFromWeights();
  kernels::cuda::Result DeriveFromBias();
  // What was made of weights or bias that are no more, by batches.
  void ForgetWeights();
  // Makes what label smoothing takes of the weights, if batches of this kind do and it is of older ones.
  kernels::cuda::Result RefreshSums(const BatchKey& kind, const kernels::Shard& shard);
  kernels::cuda::Result ReadRows(const kernels::cuda::DeviceBuffer& buffer, const RowBytes& bytes,
                                 const kernels::RowSpan& rows, void* out) const;
  // The same, put on a stream.
  static kernels::cuda::Result EnqueueRead(const kernels::cuda::DeviceBuffer& buffer, const RowBytes& bytes,
                                           const kernels::RowSpan& rows, void* out, cudaStream_t stream);
  kernels::cuda::Result EnqueueCopies(std::span<const StateCopy> copies) const;
  // Changes of weights or state that are enqueued from now on come behind copies of them.
  kernels::cuda::Result AwaitCopies() const;
  // From the host, which must leave `in` alone until the computing stream has been waited for.
  kernels::cuda::Result WriteRows(const kernels::cuda::DeviceBuffer& buffer, const RowBytes& bytes,
                                  const kernels::RowSpan& rows, const void* in) const;
  // The same of what is kept only of rows that are stepped here; INTERNAL if one is not. What is written is
  // waited for.
  absl::Status ReadStepped(const kernels::cuda::DeviceBuffer& buffer, const RowBytes& bytes,
                           const kernels::RowSpan& rows, void* out) const;
  absl::Status WriteStepped(const kernels::cuda::DeviceBuffer& buffer, const RowBytes& bytes,
                            const kernels::RowSpan& rows, const void* in) const;
  kernels::cuda::Result WriteGradientRows(const CudaGradient& gradient, int64_t first_row, int64_t rows,
                                          const float* dw) const;
  // Waits for the computing stream if `result` is ok.
  absl::Status Finished(kernels::cuda::Result result) const;
  const kernels::cuda::DeviceBuffer& BufferOf(const StateEntry& entry) const;
  RowBytes BytesOf(const StateEntry& entry) const;

  kernels::cuda::PaddedRows MatrixShape(int64_t rows) const;
  static kernels::cuda::PaddedRows BiasShape(int64_t rows) { return {1, rows, rows}; }
  // A gradient of some rows, as kernels take it.
  struct GradientParts {
    kernels::RowSpan rows;
    kernels::cuda::GradientRows dw = {};
    kernels::cuda::GradientRows db = {};
  };
  GradientParts PartsOf(const CudaGradient& gradient) const;
  kernels::cuda::Result AddTo(const CudaGradient& from, CudaGradient& to) const;
  // Zeros where it is empty, and nothing of smoothing beside it, before others are given it.
  kernels::cuda::Result Settle(CudaGradient& gradient) const;
  // Leaves tallies on the device.
  kernels::cuda::Result Tally(const GradientParts& gradient, float scale) const;
  kernels::cuda::Result TallyBias(const GradientParts& gradient, float scale) const;
  // Rows that are stepped here; *largest becomes the largest magnitude of their weights.
  kernels::cuda::Result StepMatrix(const GradientParts& gradient,
                                   const kernels::OptimizerCoefficients& coefficients, float* largest);
  kernels::cuda::Result StepBias(const GradientParts& gradient,
                                 const kernels::OptimizerCoefficients& coefficients);
  kernels::cuda::Result ReadTallies(CudaTallies* tallies) const;

  // Adds up dW of all replicas: by reading it where it is, or by having it sent. May return before it is
  // done.
  absl::Status SumMatrices(const CudaGradient& gradient, kernels::collectives::Communicator* replicas);
  // Where the only other replica's dW can be read; null if it is out of reach.
  absl::StatusOr<const float*> FindOther(const CudaGradient& gradient,
                                         kernels::collectives::Communicator* replicas);
  kernels::cuda::Result AddOther(const CudaGradient& gradient, const float* other);
  // Waits for AddOther's tally.
  kernels::cuda::Result KeepTally();
  absl::Status CheckSummed() const;
  // The sum of these rows, which are stepped here.
  GradientParts SumOf(const kernels::RowSpan& rows) const;
  absl::StatusOr<GradientTallies> TallySlice(float scale) const;
  // Returns before it is done.
  kernels::cuda::Result StepPieces(const kernels::OptimizerCoefficients& coefficients);
  int32_t GatheredPieces() const;
  // On the wires.
  absl::Status GatherPieces(kernels::collectives::Communicator* replicas);
  absl::Status GatherFloats(const kernels::SliceLayout& layout, const kernels::cuda::DeviceBuffer& floats,
                            kernels::collectives::Communicator* replicas) const;
  // DeriveFromWeights, by the largest magnitudes of the pieces where they are known.
  kernels::cuda::Result DeriveFromGathered();

  kernels::cuda::Result Enqueue(const BatchKey& kind, CudaSlot& slot);
  // Has phase one of a batch leave its rows, if there is room, and phase two take those that are `held`.
  void UseHold(const BatchKey& kind, CudaSlot& slot, const kernels::cuda::BatchRows& rows,
               const std::vector<int32_t>& held, kernels::cuda::LinearCrossEntropy::Batch* batch);
  void KeepRows(const BatchKey& kind, const CudaSlot& slot, const kernels::cuda::BatchRows& rows,
                kernels::cuda::LinearCrossEntropy::Batch* batch);
  // Where phase two finds each of its rows; nothing if it does not find all of them.
  std::vector<int32_t> FindRows(const BatchKey& kind, const CudaSlot& slot,
                                const kernels::cuda::BatchRows& rows) const;
  // They are held no longer. Places that are not one after the other are on the device.
  void TakeRows(const CudaSlot& slot, const kernels::cuda::BatchRows& rows, const std::vector<int32_t>& held,
                kernels::cuda::LinearCrossEntropy::Batch* batch);
  // Some of the rows, up to their way back.
  kernels::cuda::Result EnqueueLogits(const LogitRows& wanted, int64_t first, int64_t rows) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(device_->workspace_turn);
  // Those of this rank's entries, for all rows.
  kernels::cuda::Result OwnLogits(const LogitRows& rows);
  absl::Status LogitsOverRanks(const LogitRows& rows);
  // As a teacher, with no hidden states yet.
  kernels::cuda::TeacherHead AsTeacher() const;
  // As it will be, as far as the kind says it.
  kernels::cuda::TeacherShape ShapeOf(const TeacherKind& teacher) const;
  // `shard`: null where there is one segment.
  kernels::cuda::BatchRows FillPinned(const CudaSlot& slot, const kernels::Shard* shard,
                                      const kernels::cuda::TeacherShape* teacher) const;
  kernels::cuda::LinearCrossEntropy::Batch Describe(const BatchKey& kind, const CudaSlot& slot,
                                                    const kernels::cuda::BatchRows& rows);
  void DescribeLoss(const BatchKey& kind, const CudaSlot& slot, const kernels::cuda::BatchRows& rows,
                    kernels::cuda::LinearCrossEntropy::Batch* step) const;
  // Lists of the rows, as FillPinned and DescribeLoss have the rest.
  static void FillLists(const CudaSlot& slot, const kernels::cuda::BatchRows& rows);
  static void DescribeLists(const CudaSlot& slot, const kernels::cuda::BatchRows& rows,
                            kernels::cuda::LinearCrossEntropy::Batch* step);
  void NoteAdded(const BatchKey& kind);

  const HeadConfig config_;
  const HeadShard shard_;
  SharedCuda* const device_;
  const kernels::cuda::Path path_;
  const int64_t padded_hidden_;
  const kernels::cuda::LinearCrossEntropy::Shape shape_;
  kernels::cuda::LinearCrossEntropy step_;
  std::vector<kernels::cuda::TeacherShape> prepared_;  // teachers
  kernels::cuda::DeviceBuffer weights_;
  kernels::cuda::DeviceBuffer master_;  // fp32 [stepped rows, padded H]; empty without one
  kernels::cuda::DeviceBuffer bias_;    // empty without one, as is what is made of it
  kernels::cuda::DeviceBuffer bias_largest_;
  CudaGradient own_;
  kernels::cuda::DeviceBuffer hold_memory_;
  kernels::cuda::HoldSpace hold_space_;
  std::optional<HoldTable> holds_;  // of that; none: nothing is held
  // fp32 [stepped rows, padded H], those that the optimizer has.
  std::array<kernels::cuda::DeviceBuffer, 2> moments_;
  std::array<kernels::cuda::DeviceBuffer, 2> bias_moments_;
  // Copies of weights and state on their way to the host, beside batches.
  struct StateCopies {
    int device = 0;
    kernels::cuda::Stream stream;
    kernels::cuda::Event done;
  };
  std::shared_ptr<StateCopies> copies_;  // null without an optimizer
  kernels::cuda::DeviceBuffer weight_largest_;
  kernels::cuda::DeviceBuffer class_weights_;
  double class_weight_sum_ = 0;
  float class_weight_largest_ = 1.0f;
  // Σ C_v W_v and Σ C_v b_v of each segment that this rank has.
  std::array<kernels::cuda::DeviceBuffer, 2> vocabulary_sums_;
  std::array<kernels::cuda::DeviceBuffer, 2> bias_sums_;
  std::array<std::optional<kernels::Segments>, 2> sums_of_;  // none: of other weights than there are
  // Masters and moments are of these rows, as is the sum of the replicas' gradients.
  const kernels::RowSpan stepped_;
  CudaGradient sum_;  // [stepped rows, padded H], without smoothing; only over replicas, as what follows
  // The largest magnitude among the weights of each piece that is gathered, by replica; known from a step on
  // until weights change in another way.
  kernels::cuda::DeviceBuffer pieces_largest_;
  bool knows_pieces_largest_ = false;
  SlicePipeline slices_;
  std::weak_ptr<PeerGradients> peers_;
  // The tally of the sum's dW, where the sum was tallied as it was made.
  struct SummedTally {
    float scale = 1;
    kernels::GradientTally dw = {};
  };
  std::optional<SummedTally> summed_;
  // By which the next sum is probably tallied: the scale is told when it has been made, and trainers seldom
  // change it.
  float expected_scale_ = 1;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_BACKEND_H_
