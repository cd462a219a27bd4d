// What a device does for one head. Narrow on purpose: everything about sessions, windows and versions stays
// above it.
//
// All calls come from the device's one owner thread (BatchScheduler), and so do all calls back, so an
// implementation needs no locks.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_HEAD_BACKEND_H_
#define LOSSD_SERVER_ENGINE_DEVICE_HEAD_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/logits.h"
#include "kernels/optimizer.h"
#include "kernels/segment_tree.h"
#include "kernels/slices.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/device/batch_key.h"
#include "server/engine/device/device_report.h"
#include "server/engine/device/head_shard.h"
#include "server/engine/device/hold_table.h"
#include "server/engine/device/replica_communicators.h"
#include "server/engine/device/replica_connection.h"
#include "server/engine/device/weight_buffers.h"
#include "server/engine/memory/arena.h"
#include "server/engine/memory/host_buffer.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/memory/payload.h"
#include "server/engine/regions/region_memory.h"

namespace lossd::engine {

// A gradient of a head: dW, and what a device keeps beside it. Made by Device::CreateGradient.
class Gradient {
 public:
  virtual ~Gradient() = default;
};

// Hidden states as they arrived: in one piece, perhaps unaligned, or null and in several, which may end
// anywhere.
struct HiddenRows {
  const void* data = nullptr;
  std::span<const ByteSpan> parts = {};
  MemoryPlace place = MemoryPlace::kHost;  // other than that: in one piece, aligned to 16 bytes
  uint64_t number = 0;                     // of MemoryPlace::kRank, where there is nothing else: RankMemory's
};
HiddenRows RowsIn(const Payload& payload);

// The rows of one chunk, checked by the caller. Nothing that is pointed to is owned; it lives until the batch
// is done. Hidden states in a region may change at any time, be it while they are read: only what was read
// may be relied on, and a row that turns out not to be finite must leave dW alone.
struct ChunkRows {
  enum class Accumulate { kYes, kNo };

  int64_t tokens = 0;  // at least 1
  // [tokens, H] of the kind's hidden_type. Of a kind that another rank holds they are there, as is dX.
  HiddenRows hidden_states = {};
  HiddenRows teacher_hidden = {};   // with a teacher: [tokens, its H] of its hidden_type
  const int64_t* labels = nullptr;  // [tokens]
  int64_t ignore_index = -100;
  float gradient_scale = 1.0f;
  std::optional<float> z_gradient_scale = {};  // none: gradient_scale
  const float* token_weights = nullptr;        // [tokens]; null: 1
  const float* lse_gradients = nullptr;        // [tokens]; null: 0
  const float* entropy_gradients = nullptr;    // [tokens]; null: 0. Only of a kind that has them
  HoldName hold = {};                          // of a kind that holds
  // Lists of rows that are not ignored have the label. Only of a kind that has them.
  kernels::TokenLists kept_tokens = {};
  kernels::TargetLists target_lists = {};    // likewise, with the label or not
  Accumulate accumulate = Accumulate::kYes;  // whether the rows count in dW; kNo if loss only

  float* losses = nullptr;           // [tokens]; null if dW only
  kernels::RowReturns returns = {};  // in host memory; exactly what the kind's `returns` names
  void* dx = nullptr;                // [tokens, H] of the kind's dx_type; null if the kind's mode has none
  MemoryPlace dx_place = MemoryPlace::kHost;  // other than that: aligned to 16 bytes; kRank: `dx` is null

  bool wants_dx() const { return dx != nullptr || dx_place == MemoryPlace::kRank; }
};

struct BatchReport {
  int64_t rows_redone = 0;
  // Batches that hold: rows that phase one has left, or phase two was spared, or had to compute again.
  int64_t rows_held = 0;
  int64_t rows_taken = 0;
  int64_t rows_recomputed = 0;
};

// What a gradient times a factor adds up to in each fixed segment of the vocabulary (kernels/shard.h). A
// device that does not tell them apart has all of it in one.
struct GradientTallies {
  using PerSegment = kernels::PerSegment<kernels::GradientTally>;
  PerSegment dw = {};
  PerSegment db = {};  // zeros without a bias

  // Those of other rows.
  void Add(const GradientTallies& other);
};

// Statistics of a gradient times a factor.
struct GradientStats {
  double norm = 0;       // of dW, summed in fp64 in a fixed order
  double bias_norm = 0;  // of db
  float largest = 0;     // largest finite magnitude of both
  int64_t non_finite = 0;
};

// Segments are added in one order: it does not matter which ranks have tallied them.
GradientStats StatsOf(const GradientTallies& tallies);

// One step of a head's optimizer, everything resolved. Formulas: docs/numerics.md.
struct StepArguments {
  double learning_rate = 0;
  double gradient_scale = 1;  // multiplies the gradient first
  OptimizerConfig optimizer;  // with what this step says otherwise; kind and moments are the head's
  int64_t step = 1;           // of the optimizer, this one included
};

// The fp32 master of 16-bit weights, [V, H].
inline constexpr char kMasterTensor[] = "master_weight";

// One tensor of what a head is: for checkpoints. Rows are the vocabulary's; of the bias's, columns is 1.
struct StateTensor {
  std::string name;  // "weight", kMasterTensor, "bias", "exp_avg", "bias.exp_avg", "momentum_buffer", ...
  kernels::DataType type = kernels::DataType::kFloat32;
  int64_t rows = 0;
  int64_t columns = 0;
};

// Where a copy of such a tensor goes: all of its rows, as ReadState has them.
struct StateCopy {
  StateTensor tensor;
  void* out = nullptr;
};

// When a batch was where, as far as the device can tell: it may have looked a little later.
struct DeviceTimes {
  absl::Time input_ready;  // on the device
  absl::Time computed;     // losses and dX, on the device
};

// Rows whose logits are wanted, checked by the caller. Nothing that is pointed to is owned; all of it is in
// the host's memory.
struct LogitRows {
  int64_t rows = 0;                     // at least 1
  const void* hidden_states = nullptr;  // [rows, H] of the head's weight_type
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  Bias bias = Bias::kIgnore;  // kUse only if the head has one
  kernels::LogitOutputs outputs;
};

// What a batch tells. Both may be called before StartBatch returns.
struct BatchCallbacks {
  // The losses and dX of the chunk of this number are in its arrays and final. Once for each chunk, in order,
  // and as early as can be: dW may still be added to.
  std::function<void(size_t chunk)> on_input_gradients;
  // Once, after everything else. Ok: dW holds the whole batch. An error means that the device can no longer
  // be trusted: dW may hold part of the batch, and a chunk without on_input_gradients has no results.
  std::function<void(absl::StatusOr<BatchReport>)> on_done;
  // If it is set, once before the first on_input_gradients; never by a device that works in host memory,
  // which copies nothing.
  std::function<void(const DeviceTimes&)> on_times = {};
};

// Destroyed only when none of its batches is under way. Every call but StartBatch sees the effects of the
// batches that were started before it, and waits for them if need be. An error of any call means that the
// device can no longer be trusted.
class HeadBackend {
 public:
  virtual ~HeadBackend() = default;

  // Replaces weights and bias.
  virtual absl::Status PublishWeights(WeightBuffers staged) = 0;
  // Rows [first_row, first_row + rows) converted to `type` into `out`: of another type than the head's from
  // the master, where there is one.
  virtual absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) = 0;
  // The same rows of the bias. Only of heads that have one.
  virtual absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) = 0;

  // Copies of heads. `source` is of the same device, with as many rows and columns, of the same weight_type,
  // and with a bias if this has one. None of its batches, and none of this one's, sees anything between the
  // weights before and after.
  //
  // Weights, master and bias become what kernels/blend.h says, by a decay in [0, 1). A master is worked on
  // where this has one, and taken where the source has one; otherwise weights are widened. 0: the weights'
  // bits are the source's; the first that a head has may come so, and RESOURCE_EXHAUSTED then says that there
  // was no memory for them, and nothing more.
  //
  // Over replicas a master is there of the rows that are stepped here, so where one of the two has one, and
  // decay is not 0, only these rows become so: GatherSlices brings the others.
  virtual absl::Status BlendWeights(const HeadBackend& source, double decay);
  // The moments of the optimizer, which is the same in both.
  virtual absl::Status CopyOptimizer(const HeadBackend& source);

  // With the weights there are, in the head's workspace, as many rows at a time as fit: a row's bits do not
  // depend on those beside it. Returns when the outputs are there.
  virtual absl::Status Logits(const LogitRows& rows);
  // Upper bound on rows per logits job, so that other work is not delayed for long. At least 1.
  virtual int64_t RowsOfLogits() const { return 256; }

  // Whether the workspace has room for a row with a list of so many tokens. Any thread's.
  virtual bool HasRoomForList(int64_t /*tokens*/) const { return true; }
  // Whether batches of a kind that holds are any different. Any thread's.
  virtual bool Holds() const { return false; }

  // Has everything loaded that batches with this teacher's soft targets take; before the first of them, and
  // again at no cost. INVALID_ARGUMENT if the device has no room to compute them.
  virtual absl::Status PrepareTeacher(const HeadBackend& /*teacher*/) { return absl::OkStatus(); }

  // Most rows of this kind that are worth putting into one batch, at least 1. A single chunk may always have
  // more.
  virtual int64_t RowsPerBatch(const BatchKey& kind) const = 0;
  // `kind.teacher.backend` stays, and with it the weights that it has now, until the batch is done. Starts
  // loss, dX and, for chunks that accumulate, dW and db += of at least one chunk; or what of these the mode
  // has. A row's loss and dX are bitwise the same whatever batch it comes in, and whoever holds it; dW is
  // summed in the order of rows. Only while the device has fewer batches under way than it may have, and
  // with another holder than rank 0 only if it is a group.
  virtual void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                          BatchCallbacks callbacks) = 0;

  // Rows of a gradient, null for the head's own, in fp32 (zeros if nothing was added since the last reset).
  virtual absl::Status ReadGradient(const Gradient* gradient, int64_t first_row, int64_t rows,
                                    float* out) = 0;
  // The same rows of the bias's. Only of heads that have one.
  virtual absl::Status ReadBiasGradient(const Gradient* gradient, int64_t first_row, int64_t rows,
                                        float* out) = 0;
  // The next contribution overwrites instead of adding: no memset, no read of the old value.
  virtual void Reset(Gradient* gradient) = 0;

  // Gradients in one place: adds `from` to `to` (null: the head's own), elementwise, and resets it.
  virtual absl::Status Fold(Gradient* from, Gradient* to);
  // What a gradient, null for the head's own, adds up to.
  virtual absl::StatusOr<GradientTallies> Summarize(const Gradient* gradient, double scale);
  // Updates the weights, the master if there is one and the optimizer's state by this gradient, null for the
  // head's own; everything made of the weights is then that of the new ones. Bitwise repeatable. Tells what
  // Summarize with gradient_scale would have. Only of heads with an optimizer.
  virtual absl::StatusOr<GradientTallies> ApplyStep(const Gradient* gradient, const StepArguments& arguments);

  // A head over replicas (HeadShard) has these in place of ApplyStep. It is one that has a gradient; every
  // replica makes the same calls in the same order. One that exchanges something may fail with UNAVAILABLE,
  // because a replica was lost; it is then made again by all of them, with new communicators.
  //
  // The rows of a slice, where there are any, in their order. `slices` is of all rows of the head: one device
  // has a slice of them in one piece, a group a piece at every rank.
  virtual std::vector<kernels::RowSpan> SliceRows(const kernels::SliceLayout& slices, int32_t slice) const;
  // Adds up this gradient, null for the head's own, of all replicas in their order, which it leaves as it is,
  // into a sum of the rows that are stepped here. Each row is stepped at one replica.
  virtual absl::Status SumSlices(Gradient* gradient, const ReplicaCommunicators& replicas);
  // Adds a gradient of one replica to that sum, and leaves it as it is: a deterministic session's, one after
  // the other. Elsewhere `gradient` is not looked at.
  virtual absl::Status AddToSum(Gradient* gradient, int32_t replica, const ReplicaCommunicators& replicas);
  // What the sum adds up to, of all replicas. Like all that takes the sum it is INTERNAL without one: before
  // SumSlices, and behind one that failed.
  virtual absl::StatusOr<GradientTallies> TallySum(double scale, const ReplicaCommunicators& replicas);
  // Updates the rows that are stepped here by the sum. May return before that is done: GatherSlices comes
  // next, sends rows on while others are stepped, and tells what went wrong.
  virtual absl::Status StepSlices(const StepArguments& arguments);
  // All rows become those of the replica that steps them, and what is made of the weights that of the new
  // ones.
  virtual absl::Status GatherSlices(const ReplicaCommunicators& replicas);
  // Rows of the sum, and of the bias's; of those that are stepped here.
  virtual absl::Status ReadSum(int64_t first_row, int64_t rows, float* out);
  virtual absl::Status ReadBiasSum(int64_t first_row, int64_t rows, float* out);

  // Checkpoints: what there is beside gradients, and rows of it as they are. What was written counts from
  // RestoreState on, which comes last. Over replicas the master and the optimizer's state are only of rows
  // that are stepped here, and GatherSlices comes after RestoreState; but a master's row that is written
  // where others step it becomes a row of the weights.
  virtual std::vector<StateTensor> StateTensors() const { return {}; }
  virtual absl::Status ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out);
  virtual absl::Status WriteState(const std::string& tensor, int64_t first_row, int64_t rows, const void* in);
  // Copies tensors, as they are now, to memory of Device::CreateRegionMemory. Batches that are started later
  // go on beside it; a change of weights or state waits for it on the device. The returned function waits
  // until the copies are there, and may be called by any thread. Until it has returned the memory must stay,
  // and no other copy may begin. Not over replicas.
  using CopyDone = std::function<absl::Status()>;
  virtual absl::StatusOr<CopyDone> CopyState(std::span<const StateCopy> copies);
  virtual absl::Status RestoreState() { return absl::OkStatus(); }
  // Replaces rows of a gradient, of db too where `bias` is not null. All rows are written, in order, before
  // anything else is done with it.
  virtual absl::Status WriteGradient(Gradient* gradient, int64_t first_row, int64_t rows, const float* dw,
                                     const float* bias);

  absl::Status ReadGradientRows(int64_t first_row, int64_t rows, float* out) {
    return ReadGradient(nullptr, first_row, rows, out);
  }
  void ResetGradient() { Reset(nullptr); }

  // What the head holds on the device.
  virtual MemoryPlan MemoryReport() const = 0;
};

// A device that heads are created on. CreateHead, CreateGradient, and what tells of sizes, may be called by
// any thread, one at a time; the rest belongs to the owner thread.
class Device : public RegionSource {
 public:
  ~Device() override = default;

  virtual std::string name() const = 0;         // "cpu"
  virtual std::string description() const = 0;  // for people
  // Whether it is the host itself, whose memory and processors all ranks of a host share.
  virtual bool IsHost() const { return false; }
  // Where a GPU is, "00000000:1b:00.0", as the driver's tools name it; empty for what is none.
  virtual std::string pci_bus_id() const { return ""; }
  // What heads and the device's own buffers may take together.
  virtual int64_t AvailableMemory() const = 0;
  // What a head would need, before anything is taken. INVALID_ARGUMENT if the device can never hold it.
  virtual absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const = 0;
  // Takes the memory. RESOURCE_EXHAUSTED if the system does not give it.
  virtual absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) = 0;
  // The same for what one rank of a group has of a head: `config` is of these rows alone, but for its class
  // weights, which are those of the whole vocabulary. StartBatch and Logits are then called at every rank, in
  // the same order and with the same arguments, but for what only the answering rank has: hidden states, and
  // memory for results. FAILED_PRECONDITION from a device that cannot be part of a group:
  // SpreadsHeads(). A whole head that is one of replicas (HeadShard) is created so, too, also by a group.
  virtual bool SpreadsHeads() const { return false; }
  // Before the first shard: all ranks call it at the same time, and it waits for them. `communicator` moves
  // memory of the device, and outlives it. FAILED_PRECONDITION if these devices cannot be one group.
  virtual absl::Status JoinRanks(kernels::collectives::Communicator* /*communicator*/) {
    return absl::OkStatus();
  }
  virtual absl::StatusOr<MemoryPlan> PlanShard(const HeadConfig& config, const HeadShard& shard) const;
  virtual absl::StatusOr<std::unique_ptr<HeadBackend>> CreateShard(const HeadConfig& config,
                                                                   const HeadShard& shard);
  // Connects this device with those of the other replicas, which call this too, and returns when all are
  // connected: for a head over replicas, anew whenever one was lost. `rendezvous` is that of the replicas,
  // and used until this returns. UNAVAILABLE if one does not come in time, INTERNAL if the device fails. Any
  // thread's, one at a time, beside every other call.
  virtual absl::StatusOr<std::shared_ptr<ReplicaConnection>> ConnectReplicas(
      const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous);
  // A gradient for a head of this configuration, beside its own, and what it takes. Used with that head
  // alone, and destroyed while none of its batches is under way, before the device. RESOURCE_EXHAUSTED if the
  // system does not give the memory.
  virtual MemoryPlan PlanGradient(const HeadConfig& config) const {
    return {{"gradient", config.gradient_bytes() + config.bias_gradient_bytes()}};
  }
  virtual absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& config);
  // Whether batches of such a head may have kernels::Segments::kFixed. Without it there are none with
  // fixed_segments, and chunks of deterministic sessions have the same bits only on the same number of
  // devices.
  virtual bool HasFixedSegments(const HeadConfig& /*config*/) const { return false; }
  // Whether chunks may have lists of tokens.
  virtual bool TakesTokenLists() const { return true; }
  // Hidden-state bytes of the chunks that it would rather have; 0: no opinion.
  virtual int64_t PreferredChunkBytes() const { return 0; }
  // All of its memory, whoever uses it; zeros if it does not tell. Any thread's, beside every other call.
  virtual DeviceTotals Totals() const { return {}; }
  // The ranks that it is made of, without the leader's memory; none if it is no group. Any thread's, beside
  // every other call, for none of which it waits.
  virtual GroupReport Group() const { return {}; }
  // Has the device do a little, whatever else it does, and waits until it is done: for ever, if the device
  // does not come back. An error means that nothing will work any more. Any thread's, beside every other
  // call.
  virtual absl::Status RoundTrip() { return absl::OkStatus(); }
  // Memory that belongs to the device rather than to a head.
  virtual MemoryPlan SharedMemory() const = 0;
  // Memory of the host that the device copies from and to by itself, for payloads and results; nothing if it
  // has none, or none left: then any memory does. Any thread's, beside every other call; it may outlive the
  // device.
  virtual std::optional<ResultBytes> RegisteredBytes(int64_t /*bytes*/) { return std::nullopt; }

  // How much of that memory is used by now; zeros where there is none. Any thread's.
  virtual PoolUsage RegisteredUsage() const { return {}; }

  // Memory to be shared with a client. A device that has none of its own gives whole pages of
  // RegionKind::kSystem, all of which count against AvailableMemory.
  int64_t RegionBytes(RegionKind /*kind*/, int64_t asked) const override { return WholePages(asked); }
  MemoryPlan PlanRegion(RegionKind /*kind*/, int64_t bytes) const override { return {{"regions", bytes}}; }
  absl::StatusOr<std::shared_ptr<RegionMemory>> CreateRegionMemory(RegionKind kind, int64_t bytes) override;

  // Most batches, of all heads, that may be under way at once: started and not done.
  virtual int64_t MostBatches() const { return 1; }
  // None, always, on a device that is done with a batch before StartBatch returns.
  virtual int64_t BatchesUnderWay() const { return 0; }
  // Calls back for everything that has become final since the last call, in the order in which batches were
  // started. Never blocks. To be called again and again while anything is under way.
  virtual void Poll() {}

  // Why SpreadsHeads() is false.
  absl::Status NoShards() const;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_HEAD_BACKEND_H_
