#include "tests/simulation/schedule.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::simulation {
namespace {

constexpr int kMostClients = 3;
constexpr int kEventsToRecover = 20000;
constexpr uint64_t kRankSeed = 1'000'000'007;
constexpr uint64_t kSetSeed = 2'000'000'011;

}  // namespace

std::string Text(const absl::Status& status) {
  return status.ok() ? "ok" : absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
}

Outcome RunSchedule(const ScheduleOptions& options) { return Schedule(options).Run(); }

Schedule::Schedule(const ScheduleOptions& options)
    : random_(options.seed),
      rank_random_(options.seed + kRankSeed),
      set_random_(options.seed + kSetSeed),
      options_(options) {
  engine::HeadConfig& head = server_options_.head;
  head.name = kHead;
  head.vocab_size = kVocab;
  head.hidden_size = kHidden;
  head.weight_type = kernels::DataType::kFloat32;
  head.bias = true;
  if (random_.OneIn(2)) head.optimizer.kind = engine::OptimizerKind::kSgd;
  head.double_buffer = random_.OneIn(2);
  slow_device_ = random_.OneIn(3);
  server_options_.device = {.most_batches = 1 + random_.Below(3), .rows_per_batch = 1 + random_.Below(4)};
  server_options_.checkpoint_folder = options.folder;
  server_options_.group = rank_random_.OneIn(2);
  server_options_.tracing = options.tracing == Tracing::kYes;
  slow_rank_ = rank_random_.OneIn(2);
  const bool chosen = set_random_.OneIn(3);
  server_options_.replicas =
      options.replicas == Replicas::kAll || (chosen && options.replicas == Replicas::kSome);
  if (server_options_.replicas) server_options_.group = false;
  server_options_.on_return = [this](const std::string& tag) { restored_ = tag; };
  const int clients = 1 + random_.Below(kMostClients);
  for (int i = 0; i < clients; ++i) {
    ClientState& client = clients_.emplace_back();
    client.key = absl::StrCat("c", i);
    client.lanes = 1 + random_.Below(2);
    const bool deterministic = random_.OneIn(5) && !server_options_.replicas;
    if (deterministic) client.deterministic = engine::Deterministic::kYes;
  }
  left_to_make_ = 20 + random_.Below(60);
  outcome_.configuration = absl::StrCat(
      clients, " clients, ", head.optimizer.kind == engine::OptimizerKind::kNone ? "flushes" : "steps",
      head.double_buffer ? ", double buffer" : "", server_options_.group ? ", two ranks" : "",
      server_options_.replicas ? ", two replicas" : "");
}

void Schedule::Say(absl::string_view text) {
  if (options_.tracing != Tracing::kYes) return;
  if (server_ != nullptr) {
    for (std::string& line : std::exchange(server_->rank_record().trace, {})) {
      outcome_.trace.push_back(std::move(line));
    }
  }
  outcome_.trace.emplace_back(text);
}

void Schedule::Diverge(absl::string_view what) {
  Say(absl::StrCat("DIVERGENCE: ", what));
  if (!Diverged()) outcome_.divergence = std::string(what);
}

Outcome Schedule::Run() {
  server_ = std::make_unique<SimServer>(server_options_, options_.sabotage);
  incarnations_ = Incarnations();
  for (float& value : progress_.weights.matrix) value = static_cast<float>(random_.Below(5) - 2);
  version_ = server_->Create(progress_.weights);
  versions_[version_] = progress_.weights;
  restores_ = server_->head()->restores();
  const int events = 300 + random_.Below(700);
  for (int i = 0; i < events && !Diverged(); ++i) {
    RankEvent();
    if (random_.OneIn(12)) {
      Disturb();
    } else {
      Event();
    }
    if (!server_->device_failure().ok()) EndLostEpoch();
  }
  if (!Diverged()) CalmDown();
  if (!Diverged()) CheckEnd();
  KillStreams();
  Say("the end");
  outcome_.sabotaged = server_->sabotaged();
  for (const auto& [event, count] : server_->rank_record().events) outcome_.events[event] += count;
  server_ = nullptr;
  return std::move(outcome_);
}

// One thing that happens in a run where nothing goes wrong.
void Schedule::Event() {
  ClientState& client = clients_[static_cast<size_t>(random_.Below(static_cast<int>(clients_.size())))];
  const auto lane = static_cast<size_t>(random_.Below(client.lanes));
  LaneState* state = client.session == nullptr ? nullptr : &client.session->lanes[lane];
  const bool streams = state != nullptr && state->stream != nullptr;
  const int32_t replica = AnyReplica();
  switch (random_.Below(10)) {
    case 0:
      if (left_to_make_ == 0 || client.pending.size() > 6) return;
      --left_to_make_;
      client.pending.push_back(MakeItem(items_++, &random_));
      if (client.pending.back().kind == ItemKind::kGood) {
        workload_[client.pending.back().number] = client.pending.back();
      }
      return;
    case 1:
      if (!streams) return Connect(client, lane);
      return Plan(client, lane);
    case 2:
      if (streams) Send(client, lane);
      return;
    case 3:
      if (streams && state->stream->CanDeliver()) state->stream->Deliver();
      return;
    case 4:
      if (streams) Receive(client, lane);
      return;
    case 5:
      if (DeviceRests()) return;
      ++server_->gate(replica).answers;
      return server_->StepDevice(replica);
    case 6:
      if (DeviceRests()) return;
      ++server_->gate(replica).ends;
      return server_->StepDevice(replica);
    case 7:
      if (!orphans_.empty()) TickOrphan();
      return;
    case 8:
      // Windows are long.
      if (phase_ == Phase::kIdle && !calm_ && !random_.OneIn(4)) return;
      return Tick();
    default:
      if (!DeviceRests()) server_->StepDevice(replica);
  }
}

// A slow one has chunks waiting for it.
bool Schedule::DeviceRests() { return slow_device_ && !calm_ && !random_.OneIn(6); }

// One thing that goes wrong, or is seldom done.
void Schedule::Disturb() {
  ClientState& client = clients_[static_cast<size_t>(random_.Below(static_cast<int>(clients_.size())))];
  const auto lane = static_cast<size_t>(random_.Below(client.lanes));
  LaneState* state = client.session == nullptr ? nullptr : &client.session->lanes[lane];
  SimStream* stream = state == nullptr ? nullptr : state->stream.get();
  switch (random_.Below(20)) {
    case 0:
    case 1:
    case 2:
      if (stream == nullptr) return;
      Cut(client, lane);
      if (random_.OneIn(2)) return;  // the server will notice some time
      orphans_.back()->Detach();
      orphans_.pop_back();
      return;
    case 3:
      if (stream == nullptr || !stream->CanDeliver()) return;
      Count("delivered twice");
      state->log[stream->NextSequence() - 1].may_repeat = true;
      return stream->DeliverTwice();
    case 4:
      if (stream == nullptr) return;
      Send(client, lane);
      Send(client, lane);
      if (!stream->CanDeliver() || stream->under_way() < 2) return;
      Count("reordered");
      return stream->Swap();
    case 5:
      if (state != nullptr) RestartClient(client);
      return;
    case 6:
      if (state != nullptr) CloseSession(client);
      return;
    case 7:
      Count("leases ended");
      return server_->engine(AnyReplica()).ExpireSessions();
    case 8:
    case 9:
      return RepeatOldCall();
    case 10:
      return SaveCheckpoint();
    case 11:
      return random_.OneIn(3) ? RestoreInPlace() : WriteWeights();
    case 12:
      return Drain();
    case 13:
      return random_.OneIn(2) ? Kill() : void();
    case 14:
      return random_.OneIn(6) ? DeleteHead() : void();
    case 15:
      return random_.OneIn(3) ? AbortAsOperator() : CallAsRival();
    case 16:
      return random_.OneIn(2) ? CallOfAnotherPast() : ReadStats();
    case 17:
    case 18:
      return StageWrite();
    default:
      Count("stream fenced");  // by the same client, which does not wait for the end of the old one
      if (stream != nullptr) {
        Orphan(*state);
        Connect(client, lane);
      }
      return;
  }
}

bool Schedule::Finished() const {
  if (phase_ != Phase::kIdle || !AllAnswered()) return false;
  return std::all_of(workload_.begin(), workload_.end(),
                     [this](const auto& item) { return progress_.consumed.contains(item.first); });
}

// Nothing goes wrong any more: everything has to come to its end.
void Schedule::CalmDown() {
  calm_ = true;
  left_to_make_ = 0;
  Say("nothing goes wrong any more");
  EndDoomedEpoch();
  for (int i = 0; i < kEventsToRecover && !Diverged(); ++i) {
    if (!LostServer() && Finished()) return;
    RankEvent();
    Event();
    if (!server_->device_failure().ok()) EndLostEpoch();
  }
  if (!Diverged()) Diverge("the run does not come to its end");
}

void Schedule::CheckEnd() {
  Values left = ContentOf(WindowMarks());
  if (!(left == Values())) Diverge("the window holds something that nobody consumes");
  if (!(server_->Weights() == progress_.weights)) Diverge("the weights are others in the end");
  for (const auto& [number, item] : workload_) {
    if (!progress_.consumed.contains(number)) Diverge(absl::StrCat("item ", number, " is lost"));
  }
}

}  // namespace lossd::simulation
