// One rank's part of a head, and what the ranks do together with all parts.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARD_HEAD_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARD_HEAD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "kernels/slices.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/sharded/rank_watch.h"
#include "server/engine/group/group_command.h"

namespace lossd::engine {

// A rank's place in its group. Communicators outlive what is made with them; `host` moves memory of the host,
// `device` that of the device, and they are one where the device is the host.
struct RankPlace {
  int32_t rank = 0;
  int32_t ranks = 1;
  kernels::collectives::Communicator* host = nullptr;
  kernels::collectives::Communicator* device = nullptr;
  RankWatch* watch = nullptr;  // what the rank does; may be null
  int32_t host_ranks = 0;      // that share the memory of this host; 0: all
  // That of the group's ranks, for when they connect to those of other replicas; null: they cannot.
  kernels::collectives::Rendezvous* rendezvous = nullptr;
};

// The rows of a head of this configuration that the rank has, as a configuration of their own. Every rank has
// some: see CheckRanks.
HeadConfig ShardConfigOf(const HeadConfig& config, const RankPlace& place);
HeadShard ShardOf(const HeadConfig& config, const RankPlace& place, const ReplicaPlace& replica);
// INVALID_ARGUMENT if there are more ranks than entries of the vocabulary.
absl::Status CheckRanks(const HeadConfig& config, int32_t ranks);

// What a rank tells of its device and of what it does; not of memory. Does not wait for the device.
RankReport ReportOf(const Device& device, const RankPlace& place);

// Every rank calls the same methods in the same order with the same arguments, but for pointers to what only
// the leader (rank 0) gives or gets: they are null elsewhere. All by the device's owner thread. Rows are of
// the whole vocabulary. A method that fails at one rank leaves the others waiting: the group has to end.
class ShardHead {
 public:
  // What this rank's part takes: writes of weights are staged whole at the leader, and go to the others row
  // by row.
  static absl::StatusOr<MemoryPlan> Plan(const Device& device, const HeadConfig& config,
                                         const RankPlace& place, const ReplicaPlace& replica);
  // Takes the memory on `device`, which outlives it, and all that a later call needs: none of them may fail
  // at one rank alone. RESOURCE_EXHAUSTED if this rank has too little.
  static absl::StatusOr<std::unique_ptr<ShardHead>> Create(Device* device, const HeadConfig& config,
                                                           const RankPlace& place,
                                                           const ReplicaPlace& replica);

  HeadBackend& local() { return *local_; }
  const HeadBackend& local() const { return *local_; }
  // That of the whole head.
  const HeadConfig& config() const { return config_; }

  // Puts the rows at the leader's `out`. `gradient` is this rank's, null for the head's own.
  absl::Status ReadRows(const ReadRowsCommand& what, const Gradient* gradient, void* out);
  // Spreads the rows at the leader's `in`, and with a bias those at `bias`.
  absl::Status WriteRows(const WriteRowsCommand& what, Gradient* gradient, const void* in, const float* bias);
  // What the whole gradient adds up to from what this rank's rows do, at every rank.
  absl::StatusOr<GradientTallies> Merge(const absl::StatusOr<GradientTallies>& own);

  // HeadBackend's, of a head over replicas: each rank exchanges something with the ranks of its number in the
  // other groups; `replicas` is null where it has no connection with them. That may come to nothing at one
  // rank alone, so all ranks of the group agree on the `outcome`; what is returned is an error of this group.
  absl::Status SumSlices(Gradient* gradient, const ReplicaCommunicators* replicas, absl::Status* outcome);
  absl::Status AddToSum(Gradient* gradient, int32_t replica, const ReplicaCommunicators* replicas,
                        absl::Status* outcome);
  absl::Status TallySum(double scale, const ReplicaCommunicators* replicas,
                        absl::StatusOr<GradientTallies>* outcome);
  absl::Status GatherSlices(const ReplicaCommunicators* replicas, absl::Status* outcome);
  // The rows of a slice, of the whole vocabulary: some at every rank.
  std::vector<kernels::RowSpan> SliceRows(int32_t slice) const;
  // INTERNAL if this replica has not all of these rows, because others step them. To be asked before all
  // ranks are told to read or write them.
  absl::Status CheckHas(const ReadRowsCommand& what) const;

 private:
  struct Rows {
    int64_t first = 0;
    int64_t count = 0;
  };
  // Bytes of rows that each rank has of a range.
  using RankBytes = std::vector<int64_t>;

  ShardHead(HeadConfig config, const RankPlace& place, const ReplicaPlace& replica,
            std::unique_ptr<HeadBackend> local, HostBuffer room);

  // What rank `rank` has of these rows, counted from its own first one.
  Rows LocalRows(int32_t rank, Rows rows) const;
  Rows OwnRows(Rows rows) const { return LocalRows(place_.rank, rows); }
  // What each rank but the leader has of them, and what one of them has.
  RankBytes BytesOfOthers(Rows rows, int64_t row_bytes) const;
  RankBytes AtLeader(int64_t bytes) const;
  bool leads() const;

  // Calls work(rows, offset) for pieces of the rows that `room_` has room for, in order; `offset` counts the
  // rows before them.
  using Work = absl::FunctionRef<absl::Status(Rows rows, int64_t offset)>;
  absl::Status InPieces(Rows rows, int64_t row_bytes, Work work) const;
  // `at` has the rows of one piece that are this rank's; at the leader those of the others go behind them, or
  // come from there.
  absl::Status Gather(Rows rows, int64_t row_bytes, std::byte* at);
  absl::Status Scatter(Rows rows, int64_t row_bytes, const std::byte* in, std::byte* room);

  // `outcome`, which is this rank's, becomes that of the first rank to which it is not OK.
  absl::Status Agree(absl::Status* outcome);
  kernels::SliceLayout SlicesOf(int32_t rank) const { return {layout_.rows(rank), replica_.replicas}; }

  // The same rows, this rank's.
  absl::Status ReadLocal(const ReadRowsCommand& what, const Gradient* gradient, Rows rows, std::byte* out);
  absl::Status WriteLocal(const WriteRowsCommand& what, Gradient* gradient, Rows rows, const std::byte* in,
                          const std::byte* bias);
  absl::StatusOr<int64_t> RowBytes(const ReadRowsCommand& what) const;

  const HeadConfig config_;
  const RankPlace place_;
  const ReplicaPlace replica_;
  const kernels::ShardLayout layout_;
  const std::unique_ptr<HeadBackend> local_;
  HostBuffer room_;  // of a piece on its way; none at the leader, which has it in the caller's memory
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARD_HEAD_H_
