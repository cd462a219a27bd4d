#include "server/engine/parked_head.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/head/parts/logits_call.h"

namespace lossd::engine {

absl::StatusOr<std::shared_ptr<ParkedHead>> ParkedHead::Create(MemoryBudget* budget, const HeadConfig& config,
                                                               const FileSizes& files) {
  int64_t bytes = 0;
  for (const auto& [name, size] : files) bytes += size;
  MemoryPlan plan = {{"weights", bytes}, {"class_weights", config.class_weight_bytes()}};
  auto reservation =
      budget->Reserve(config.name, absl::StrCat("parking head ", config.name), std::move(plan));
  if (!reservation.ok()) return reservation.status();
  std::shared_ptr<ParkedHead> head(new ParkedHead(*std::move(reservation)));
  for (const auto& [name, size] : files) {
    absl::StatusOr<HostBuffer> buffer = HostBuffer::Create(size, Commit::kNow);
    if (!buffer.ok()) return buffer.status();
    head->files_.emplace(name, *std::move(buffer));
  }
  return head;
}

absl::Status ParkedHead::Add(const std::string& name, const std::string& /*key*/,
                             absl::FunctionRef<absl::Status(const Append& append)> fill) {
  const auto file = files_.find(name);
  if (file == files_.end()) return absl::InternalError(absl::StrCat("no room was taken for ", name));
  std::span<std::byte> room = file->second.span();
  return fill([&room, &name](std::span<const std::byte> bytes) {
    if (bytes.size() > room.size()) {
      return absl::InternalError(absl::StrCat(name, " is larger than was said"));
    }
    std::copy(bytes.begin(), bytes.end(), room.begin());
    room = room.subspan(bytes.size());
    return absl::OkStatus();
  });
}

absl::Status ParkedHead::CopyFrom(const StateSource& source) {
  for (auto& [name, buffer] : files_) {
    if (absl::Status read = source.Read(name, 0, buffer.span()); !read.ok()) return read;
  }
  Complete(source.checkpoint());
  return absl::OkStatus();
}

absl::Status ParkedHead::WriteTo(StateSink* sink) const {
  for (const auto& [name, buffer] : files_) {
    const std::span<const std::byte> bytes(buffer.data(), static_cast<size_t>(buffer.size()));
    const absl::Status written = sink->Add(name, "", [bytes](const auto& append) { return append(bytes); });
    if (!written.ok()) return written;
  }
  return absl::OkStatus();
}

absl::Status ParkedHead::Read(const std::string& name, int64_t offset, std::span<std::byte> out) const {
  const auto file = files_.find(name);
  const auto end = offset + static_cast<int64_t>(out.size());
  if (file == files_.end() || end > file->second.size()) {
    return absl::InternalError(absl::StrCat(name, " does not have bytes ", offset, " to ", end));
  }
  std::memcpy(out.data(), file->second.data() + offset, out.size());
  return absl::OkStatus();
}

std::vector<SessionMarks> ParkedHead::WindowMarks() const {
  if (checkpoint_.config.weight_gradients == WeightGradients::kFrozen) return {};
  AccumulationLedger::Sessions sessions;
  for (const SessionCheckpoint& entry : checkpoint_.sessions) {
    AccumulationLedger::Session& session = sessions.emplace(entry.id, entry.session).first->second;
    for (AccumulationLedger::Lane& lane : session.lanes) lane.applied = lane.accepted;
  }
  std::vector<SessionMarks> all = AccumulationLedger::WindowMarksOf(sessions, false);
  for (SessionMarks& marks : all) {
    marks.past = {checkpoint_.incarnation, checkpoint_.restores};
    marks.generation = checkpoint_.window.generation;
  }
  return all;
}

HeadInfo ParkedHead::Info(const ChunkLimits& limits) const {
  HeadInfo info;
  info.config = checkpoint_.config;
  info.weight_version = checkpoint_.weight_version;
  info.generation = checkpoint_.window.generation;
  info.window_tokens = checkpoint_.window.tokens;
  info.window_marks = WindowMarks();
  info.optimizer_steps = checkpoint_.optimizer_steps;
  info.max_logits_bytes = MostLogitsBytes(limits);
  info.max_logits_rows = limits.max_chunk_tokens;
  info.parked_bytes = bytes();
  return info;
}

}  // namespace lossd::engine
