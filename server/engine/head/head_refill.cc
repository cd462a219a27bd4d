// How a replica that has nothing gets all of it from its neighbours: docs/decisions/0022-replicas.md.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/collectives/communicator.h"
#include "kernels/slices.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

using kernels::RowSpan;
using kernels::SliceLayout;
using kernels::collectives::Communicator;

// One slice on its way: who has it, and who is to have it.
struct Delivery {
  int32_t from = 0;
  std::vector<int32_t> to;

  bool goes_to(int32_t replica) const { return std::find(to.begin(), to.end(), replica) != to.end(); }
};

Delivery DeliveryOf(const SliceLayout& layout, int32_t slice, const std::vector<bool>& empty) {
  Delivery delivery{.from = empty[static_cast<size_t>(slice)] ? layout.MirrorOf(slice) : slice, .to = {}};
  for (const int32_t holder : {slice, layout.MirrorOf(slice)}) {
    if (empty[static_cast<size_t>(holder)]) delivery.to.push_back(holder);
  }
  return delivery;
}

absl::Status Deliver(const Delivery& delivery, Communicator& replicas, std::vector<char>& bytes) {
  const auto count = static_cast<int64_t>(bytes.size());
  std::vector<Communicator::Transfer> transfers(static_cast<size_t>(replicas.size()));
  if (delivery.from == replicas.rank()) {
    for (const int32_t to : delivery.to) {
      transfers[static_cast<size_t>(to)].send = bytes.data();
      transfers[static_cast<size_t>(to)].send_bytes = count;
    }
  } else if (delivery.goes_to(replicas.rank())) {
    transfers[static_cast<size_t>(delivery.from)].receive = bytes.data();
    transfers[static_cast<size_t>(delivery.from)].receive_bytes = count;
  }
  return ToStatus(replicas.Exchange(transfers, nullptr));
}

// Takes these rows over a piece at a time: read(rows, bytes) where they are, write(rows, bytes) where they
// are to be.
template <class Read, class Write>
absl::Status DeliverRows(const Delivery& delivery, const PartRows& all, int64_t row_bytes,
                         Communicator& replicas, Read read, Write write) {
  const int64_t most = RowsOfPiece(row_bytes);
  for (int64_t first = all.rows.first; first < all.rows.end(); first += most) {
    const PartRows piece{all.tensor, {first, std::min(most, all.rows.end() - first)}};
    std::vector<char> bytes(static_cast<size_t>(piece.rows.count * row_bytes));
    absl::Status status;
    if (delivery.from == replicas.rank()) status = read(piece, bytes.data());
    if (status.ok()) status = Deliver(delivery, replicas, bytes);
    if (status.ok() && delivery.goes_to(replicas.rank())) status = write(piece, bytes.data());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

void Head::RefillPart(const Refill& refill, std::shared_ptr<const ReplicaCommunicators> replicas,
                      std::function<void(absl::Status)> done) {
  PostExchange([self = shared_from_this(), refill, replicas = std::move(replicas), done = std::move(done)] {
    absl::Status filled = self->RefillNow(refill, *replicas);
    if (absl::IsInternal(filled)) self->OnDeviceFailure(filled);
    done(std::move(filled));
  });
}

absl::Status Head::RefillNow(const Refill& refill, const ReplicaCommunicators& replicas) {
  if (absl::Status alive = CheckAlive(); !alive.ok()) return alive;
  std::vector<std::string> tensors;
  for (const StateTensor& tensor : backend_->StateTensors()) tensors.push_back(tensor.name);
  if (refill.sums) tensors.emplace_back();
  const SliceLayout layout(config_.vocab_size, environment_.place.replicas);
  for (int32_t slice = 0; slice < layout.replicas(); ++slice) {
    const Delivery delivery = DeliveryOf(layout, slice, refill.empty);
    if (delivery.to.empty()) continue;
    for (const RowSpan& rows : slices_[static_cast<size_t>(slice)]) {
      for (const std::string& tensor : tensors) {
        const absl::StatusOr<int64_t> row_bytes = PartRowBytes(tensor);
        if (!row_bytes.ok()) return row_bytes.status();
        absl::Status delivered = DeliverRows(
            delivery, {tensor, rows}, *row_bytes, *replicas.host,
            [this](const PartRows& piece, char* to) { return ReadHeldRows(piece, to); },
            [this](const PartRows& piece, const char* from) { return WriteHeldRows(piece, from); });
        if (!delivered.ok()) return delivered;
      }
    }
  }
  const bool filled = refill.empty[static_cast<size_t>(environment_.place.replica)];
  return filled ? backend_->RestoreState() : absl::OkStatus();
}

void Head::InstallPart(const PartState& part) {
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    Window window;
    window.generation = part.generation;
    window.last_step = part.last_step;
    window.committed = part.committed;
    window.aborted = part.aborted;
    window_.Install(std::move(window), absl::Now());
    WeightStore::State weights;
    weights.version = part.weight_version;
    weights.optimizer_steps = part.optimizer_steps;
    weights.last_committed_write = part.last_write;
    weights.last_committed_version = part.weight_version;
    weights_.Install(std::move(weights));
    history_.Continue(part.restores, {});
    if (part.end.has_value()) {
      window_.Begin(part.end->marks, part.end->by);
      window_.Reach(EndingPhase::kSummed);
      joint_step_ = part.step;
      if (part.flush.has_value()) {
        absl::StatusOr<FlushInfo> held = *part.flush;
        (void)window_.Seal(&held);
        sessions_.Seal();
      }
    }
    lifecycle_.EndFill();
    waiting = TakeWaitingLocked();
  }
  Call(waiting);
}

}  // namespace lossd::engine
