#include "server/engine/device/sharded/shard_head.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/device/slice_tallies.h"

namespace lossd::engine {

using kernels::RowSpan;
using kernels::SizeOf;

namespace {

constexpr int32_t kLeader = 0;
// What goes between ranks at once. Large enough that waiting for each other does not count.
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int64_t kFloat = SizeOf(kernels::DataType::kFloat32);

std::string HostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// A piece of this rank's rows, of whichever kind: fp32 is the widest, and with a gradient goes that of the
// bias.
int64_t RoomBytes(const HeadConfig& config, const RankPlace& place) {
  if (place.rank == kLeader) return 0;
  const int64_t row_bytes = (config.hidden_size + (config.bias ? 1 : 0)) * kFloat;
  const int64_t rows = ShardConfigOf(config, place).vocab_size;
  return std::min(rows * row_bytes, std::max(kPieceBytes, row_bytes));
}

}  // namespace

HeadConfig ShardConfigOf(const HeadConfig& config, const RankPlace& place) {
  HeadConfig own = config;
  own.vocab_size = kernels::ShardLayout(config.vocab_size, place.ranks).rows(place.rank);
  return own;
}

HeadShard ShardOf(const HeadConfig& config, const RankPlace& place, const ReplicaPlace& replica) {
  return {.layout = kernels::ShardLayout(config.vocab_size, place.ranks),
          .rank = place.rank,
          .communicator = place.device,
          .host_communicator = place.host,
          .observer = place.watch,
          .replica = replica.replica,
          .replicas = replica.replicas};
}

absl::Status CheckRanks(const HeadConfig& config, int32_t ranks) {
  if (config.vocab_size >= ranks) return absl::OkStatus();
  return Invalid(RejectReason::kShape, "vocab_size",
                 absl::StrCat("vocab_size is ", config.vocab_size, "; this server spreads it over ", ranks,
                              " devices and needs at least one entry for each"));
}

RankReport ReportOf(const Device& device, const RankPlace& place) {
  RankReport report;
  report.device = device.name();
  report.description = device.description();
  report.pci_bus_id = device.pci_bus_id();
  report.host = HostName();
  if (place.watch != nullptr) report.activity = place.watch->Read();
  return report;
}

absl::StatusOr<MemoryPlan> ShardHead::Plan(const Device& device, const HeadConfig& config,
                                           const RankPlace& place, const ReplicaPlace& replica) {
  absl::StatusOr<MemoryPlan> plan =
      device.PlanShard(ShardConfigOf(config, place), ShardOf(config, place, replica));
  if (!plan.ok()) return plan;
  const bool leads = place.rank == kLeader;
  const int64_t staged = leads ? config.staged_bytes() + config.bias_bytes() : RoomBytes(config, place);
  for (MemoryItem& item : *plan) {
    if (item.purpose == "weight_staging") item.bytes = staged;
  }
  return plan;
}

absl::StatusOr<std::unique_ptr<ShardHead>> ShardHead::Create(Device* device, const HeadConfig& config,
                                                             const RankPlace& place,
                                                             const ReplicaPlace& replica) {
  absl::StatusOr<HostBuffer> room = HostBuffer::Create(RoomBytes(config, place), Commit::kNow);
  if (!room.ok()) return room.status();
  absl::StatusOr<std::unique_ptr<HeadBackend>> local =
      device->CreateShard(ShardConfigOf(config, place), ShardOf(config, place, replica));
  if (!local.ok()) return local.status();
  return std::unique_ptr<ShardHead>(
      new ShardHead(config, place, replica, *std::move(local), *std::move(room)));
}

ShardHead::ShardHead(HeadConfig config, const RankPlace& place, const ReplicaPlace& replica,
                     std::unique_ptr<HeadBackend> local, HostBuffer room)
    : config_(std::move(config)),
      place_(place),
      replica_(replica),
      layout_(config_.vocab_size, place.ranks),
      local_(std::move(local)),
      room_(std::move(room)) {}

bool ShardHead::leads() const { return place_.rank == kLeader; }

ShardHead::Rows ShardHead::LocalRows(int32_t rank, Rows rows) const {
  const int64_t begin = std::max(rows.first, layout_.first(rank));
  const int64_t end = std::min(rows.first + rows.count, layout_.first(rank + 1));
  return end <= begin ? Rows{} : Rows{.first = begin - layout_.first(rank), .count = end - begin};
}

ShardHead::RankBytes ShardHead::BytesOfOthers(Rows rows, int64_t row_bytes) const {
  RankBytes bytes(static_cast<size_t>(place_.ranks));
  for (int32_t rank = 1; rank < place_.ranks; ++rank) {
    bytes[static_cast<size_t>(rank)] = LocalRows(rank, rows).count * row_bytes;
  }
  return bytes;
}

ShardHead::RankBytes ShardHead::AtLeader(int64_t bytes) const {
  RankBytes all(static_cast<size_t>(place_.ranks));
  all[kLeader] = bytes;
  return all;
}

absl::Status ShardHead::InPieces(Rows rows, int64_t row_bytes, Work work) const {
  if (rows.first < 0 || rows.count < 0 || rows.first > config_.vocab_size - rows.count) {
    return absl::InternalError(absl::StrCat("there are no ", rows.count, " rows from ", rows.first,
                                            " on in a vocabulary of ", config_.vocab_size));
  }
  const int64_t most = std::max<int64_t>(1, kPieceBytes / row_bytes);
  for (int64_t offset = 0; offset < rows.count; offset += most) {
    const Rows piece{.first = rows.first + offset, .count = std::min(most, rows.count - offset)};
    if (absl::Status status = work(piece, offset); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// The leader's own rows come first in every range.
absl::Status ShardHead::Gather(Rows rows, int64_t row_bytes, std::byte* at) {
  const RankBytes nothing(static_cast<size_t>(place_.ranks));
  const int64_t own_bytes = OwnRows(rows).count * row_bytes;
  const kernels::ExchangeWait wait(place_.watch, kernels::Exchange::kRows);
  if (!leads()) return ToStatus(place_.host->AllToAllV(at, AtLeader(own_bytes), nullptr, nothing, nullptr));
  return ToStatus(
      place_.host->AllToAllV(nullptr, nothing, at + own_bytes, BytesOfOthers(rows, row_bytes), nullptr));
}

absl::Status ShardHead::Scatter(Rows rows, int64_t row_bytes, const std::byte* in, std::byte* room) {
  const RankBytes nothing(static_cast<size_t>(place_.ranks));
  const int64_t own_bytes = OwnRows(rows).count * row_bytes;
  const kernels::ExchangeWait wait(place_.watch, kernels::Exchange::kRows);
  if (!leads()) return ToStatus(place_.host->AllToAllV(nullptr, nothing, room, AtLeader(own_bytes), nullptr));
  return ToStatus(
      place_.host->AllToAllV(in + own_bytes, BytesOfOthers(rows, row_bytes), nullptr, nothing, nullptr));
}

absl::StatusOr<int64_t> ShardHead::RowBytes(const ReadRowsCommand& what) const {
  switch (what.what) {
    case HeadRows::kWeights:
      return config_.hidden_size * SizeOf(what.type);
    case HeadRows::kGradient:
    case HeadRows::kSum:
      return config_.hidden_size * kFloat;
    case HeadRows::kBias:
    case HeadRows::kBiasGradient:
    case HeadRows::kBiasSum:
      return kFloat;
    case HeadRows::kState:
      break;
  }
  const absl::StatusOr<StateEntry> entry = FindState(config_, what.tensor);
  if (!entry.ok()) return entry.status();
  return entry->tensor.columns * SizeOf(entry->tensor.type);
}

absl::Status ShardHead::ReadLocal(const ReadRowsCommand& what, const Gradient* gradient, Rows rows,
                                  std::byte* out) {
  if (rows.count == 0) return absl::OkStatus();
  auto* const floats = reinterpret_cast<float*>(out);
  switch (what.what) {
    case HeadRows::kWeights:
      return local_->ReadWeightRows(rows.first, rows.count, what.type, out);
    case HeadRows::kBias:
      return local_->ReadBias(rows.first, rows.count, floats);
    case HeadRows::kGradient:
      return local_->ReadGradient(gradient, rows.first, rows.count, floats);
    case HeadRows::kBiasGradient:
      return local_->ReadBiasGradient(gradient, rows.first, rows.count, floats);
    case HeadRows::kState:
      return local_->ReadState(what.tensor, rows.first, rows.count, out);
    case HeadRows::kSum:
      return local_->ReadSum(rows.first, rows.count, floats);
    case HeadRows::kBiasSum:
      return local_->ReadBiasSum(rows.first, rows.count, floats);
  }
  return absl::InternalError("no such rows");
}

absl::Status ShardHead::ReadRows(const ReadRowsCommand& what, const Gradient* gradient, void* out) {
  const absl::StatusOr<int64_t> row_bytes = RowBytes(what);
  if (!row_bytes.ok()) return row_bytes.status();
  return InPieces({what.first_row, what.rows}, *row_bytes, [&](Rows rows, int64_t offset) {
    std::byte* const at = leads() ? static_cast<std::byte*>(out) + offset * *row_bytes : room_.data();
    absl::Status status = ReadLocal(what, gradient, OwnRows(rows), at);
    return status.ok() ? Gather(rows, *row_bytes, at) : status;
  });
}

absl::Status ShardHead::WriteLocal(const WriteRowsCommand& what, Gradient* gradient, Rows rows,
                                   const std::byte* in, const std::byte* bias) {
  if (rows.count == 0) return absl::OkStatus();
  if (what.what == HeadRows::kState) return local_->WriteState(what.tensor, rows.first, rows.count, in);
  const auto* const dw = reinterpret_cast<const float*>(in);
  const auto* const db = reinterpret_cast<const float*>(bias);
  return local_->WriteGradient(gradient, rows.first, rows.count, dw, db);
}

absl::Status ShardHead::WriteRows(const WriteRowsCommand& what, Gradient* gradient, const void* in,
                                  const float* bias) {
  const absl::StatusOr<int64_t> row_bytes = RowBytes({.what = what.what, .tensor = what.tensor});
  if (!row_bytes.ok()) return row_bytes.status();
  const int64_t bias_bytes = what.with_bias ? kFloat : 0;
  const Rows all{what.first_row, what.rows};
  return InPieces(all, *row_bytes + bias_bytes, [&](Rows rows, int64_t offset) {
    std::byte* const room = room_.data();
    std::byte* const bias_room = leads() ? nullptr : room + OwnRows(rows).count * *row_bytes;
    const std::byte* const from = leads() ? static_cast<const std::byte*>(in) + offset * *row_bytes : room;
    const std::byte* const bias_from =
        leads() ? reinterpret_cast<const std::byte*>(bias) + offset * bias_bytes : bias_room;
    absl::Status status = Scatter(rows, *row_bytes, from, room);
    if (status.ok() && what.with_bias) status = Scatter(rows, bias_bytes, bias_from, bias_room);
    if (!status.ok()) return status;
    return WriteLocal(what, gradient, OwnRows(rows), from, what.with_bias ? bias_from : nullptr);
  });
}

absl::StatusOr<GradientTallies> ShardHead::Merge(const absl::StatusOr<GradientTallies>& own) {
  if (!own.ok()) return own.status();
  const kernels::ExchangeWait wait(place_.watch, kernels::Exchange::kRows);
  return MergeTallies(*own, place_.host);
}

// Replicas

namespace {

// A status on its way; what does not fit of its message is left out.
struct Outcome {
  int32_t code = 0;
  std::array<char, 252> message = {};
};

absl::Status NotConnected() {
  return MakeError(absl::StatusCode::kUnavailable, RejectReason::kInternal, "",
                   "this rank has no connection with those of the other replicas");
}

}  // namespace

absl::Status ShardHead::Agree(absl::Status* outcome) {
  Outcome own{.code = static_cast<int32_t>(outcome->code())};
  outcome->message().copy(own.message.data(), own.message.size() - 1);
  const RankBytes bytes(static_cast<size_t>(place_.ranks), sizeof(own));
  std::vector<Outcome> all(bytes.size());
  const kernels::ExchangeWait wait(place_.watch, kernels::Exchange::kRows);
  absl::Status gathered = ToStatus(place_.host->AllGatherV(&own, bytes, all.data(), nullptr));
  if (!gathered.ok()) return gathered;
  for (size_t rank = 0; outcome->ok() && rank < all.size(); ++rank) {
    if (all[rank].code == 0) continue;
    *outcome = MakeError(static_cast<absl::StatusCode>(all[rank].code), RejectReason::kInternal, "",
                         absl::StrCat("rank ", rank, ": ", all[rank].message.data()));
  }
  return absl::OkStatus();
}

absl::Status ShardHead::SumSlices(Gradient* gradient, const ReplicaCommunicators* replicas,
                                  absl::Status* outcome) {
  *outcome = replicas == nullptr ? NotConnected() : local_->SumSlices(gradient, *replicas);
  return Agree(outcome);
}

absl::Status ShardHead::AddToSum(Gradient* gradient, int32_t replica, const ReplicaCommunicators* replicas,
                                 absl::Status* outcome) {
  *outcome = replicas == nullptr ? NotConnected() : local_->AddToSum(gradient, replica, *replicas);
  return Agree(outcome);
}

absl::Status ShardHead::TallySum(double scale, const ReplicaCommunicators* replicas,
                                 absl::StatusOr<GradientTallies>* outcome) {
  *outcome = replicas == nullptr ? NotConnected() : local_->TallySum(scale, *replicas);
  absl::Status tallied = outcome->status();
  if (absl::Status agreed = Agree(&tallied); !agreed.ok()) return agreed;
  if (!tallied.ok()) {
    *outcome = tallied;
    return absl::OkStatus();
  }
  *outcome = Merge(*outcome);
  return outcome->status();
}

absl::Status ShardHead::GatherSlices(const ReplicaCommunicators* replicas, absl::Status* outcome) {
  *outcome = replicas == nullptr ? NotConnected() : local_->GatherSlices(*replicas);
  return Agree(outcome);
}

std::vector<RowSpan> ShardHead::SliceRows(int32_t slice) const {
  std::vector<RowSpan> all;
  for (int32_t rank = 0; rank < place_.ranks; ++rank) {
    RowSpan rows = SlicesOf(rank).Slice(slice);
    rows.first += layout_.first(rank);
    if (rows.count > 0) all.push_back(rows);
  }
  return all;
}

absl::Status ShardHead::CheckHas(const ReadRowsCommand& what) const {
  bool everywhere = what.what != HeadRows::kSum && what.what != HeadRows::kBiasSum;
  if (what.what == HeadRows::kState) {
    const absl::StatusOr<StateEntry> entry = FindState(config_, what.tensor);
    if (!entry.ok()) return entry.status();
    everywhere = entry->part == StatePart::kWeight;
  } else if (what.what == HeadRows::kWeights) {
    everywhere = !config_.master_weights || what.type == config_.weight_type;
  }
  for (int32_t rank = 0; !everywhere && rank < place_.ranks; ++rank) {
    const Rows rows = LocalRows(rank, {what.first_row, what.rows});
    if (SlicesOf(rank).Slice(replica_.replica).Has({rows.first, rows.count})) continue;
    return absl::InternalError(absl::StrCat("rows ", what.first_row, " to ", what.first_row + what.rows,
                                            " are not all stepped at this replica"));
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
