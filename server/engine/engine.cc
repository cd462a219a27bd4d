#include "server/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/common/awaiting.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/common/random_id.h"
#include "server/engine/memory/process_memory.h"
#include "server/engine/replicas/joint_replicas.h"

namespace lossd::engine {
namespace {

constexpr size_t kMaxClientKey = 256;
constexpr int64_t kLanesOfCredit = 4;  // that a session has by default

// The bytes that streams of rows may hold on top of `limit`, which sessions alone may fill.
int64_t OnlyForRows(int64_t limit) { return limit / 8; }

// The rest of `limit` for sessions, and for streams of rows, when they hold `credits` and `rows` bytes.
int64_t LeftForSessions(int64_t limit, int64_t credits, int64_t rows) {
  return std::max<int64_t>(0, limit - credits - std::max<int64_t>(0, rows - OnlyForRows(limit)));
}
int64_t LeftForRows(int64_t limit, int64_t credits, int64_t rows) {
  return limit + OnlyForRows(limit) - credits - rows;
}

absl::Status UnknownHead(absl::string_view name) {
  return MakeError(
      absl::StatusCode::kNotFound, RejectReason::kUnknownHead, "head",
      absl::StrCat("head '", name,
                   "' does not exist: create it first ('lossctl head list' shows those there are)"));
}

}  // namespace

absl::Status ComingBack(absl::string_view name) {
  constexpr absl::Duration kDelay = absl::Milliseconds(20);
  absl::Status status =
      MakeError(absl::StatusCode::kUnavailable, RejectReason::kConflict, "head",
                absl::StrCat("head ", name, " was parked, and comes back once it is asked for; ask again"));
  AttachRetryDelay(&status, kDelay);
  return status;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options,
                                                       std::unique_ptr<Device> device) {
  std::unique_ptr<Engine> engine(new Engine(std::move(options), std::move(device)));
  auto reservation = engine->budget_->Reserve("", "the device", engine->device_->SharedMemory());
  if (!reservation.ok()) return reservation.status();
  engine->device_reservation_ = *std::move(reservation);
  {
    const MutexLock measuring(engine->checkpoint_mutex_);
    engine->MeasureCheckpoints();
  }
  return engine;
}

Engine::Engine(EngineOptions options, std::unique_ptr<Device> device)
    : options_(std::move(options)),
      incarnation_(options_.incarnation.empty() ? RandomId() : options_.incarnation),
      started_(absl::Now()),
      replicas_(options_.place),
      budget_(std::make_shared<MemoryBudget>(options_.memory_limit_bytes, options_.head_quota_bytes,
                                             HeadMemoryAdvice(options_.memory_bound))),
      parking_(std::make_shared<MemoryBudget>(options_.parking_bytes, 0,
                                              "delete a head that is parked, or raise --parking_bytes")),
      device_(std::move(device)),
      regions_(options_.regions, device_.get(), budget_),
      scheduler_(device_.get(), options_.batching_window, options_.device_loop) {}

Engine::~Engine() = default;

GroupReport Engine::Group() const {
  GroupReport group = device_->Group();
  if (group.ranks.empty()) {
    RankReport& one = group.ranks.emplace_back();
    one.device = device_->name();
    one.description = device_->description();
    one.pci_bus_id = device_->pci_bus_id();
  }
  RankReport& own = group.ranks.front();
  own.totals = device_->Totals();
  own.memory_limit = budget_->limit();
  own.memory_peak = budget_->peak();
  own.memory = budget_->Usage();
  own.process = ReadProcessMemory();
  return group;
}

// Heads

absl::StatusOr<std::shared_ptr<Head>> Engine::CreateHead(const HeadConfig& config) {
  if (options_.create_together == nullptr) return CreateHere(config);
  return CreateTogether(
      config.name, [&] { return CreateHere(config); },
      [&](absl::FunctionRef<absl::Status()> here) {
        absl::Status created = here();
        return created.ok() ? options_.create_together(config) : created;
      });
}

absl::StatusOr<std::shared_ptr<Head>> Engine::CreateTogether(const std::string& name, CreateOne create_here,
                                                             Together together) {
  // A head that exists, or has no live checkpoints, is created without waiting for a save.
  absl::StatusOr<bool> earlier = false;
  if (!FindHere(name).ok()) earlier = HasLiveCheckpoints(name);
  if (!earlier.ok()) return earlier.status();
  if (!*earlier) return CreateAtAll(name, Earlier::kStay, create_here, together);
  // A new head must not go back to checkpoints of an earlier head of its name. The lock keeps the replicas
  // from meeting, and any restore from running, until the mark is on disk.
  const MutexLock creating(checkpoint_mutex_);
  return CreateAtAll(name, Earlier::kMarkDeleted, create_here, together);
}

absl::StatusOr<std::shared_ptr<Head>> Engine::CreateAtAll(const std::string& name, Earlier earlier,
                                                          CreateOne create_here, Together together) {
  const MutexLock creating(together_mutex_);
  const bool was_there = FindHere(name).ok();
  absl::StatusOr<std::shared_ptr<Head>> head = absl::UnknownError("not yet");
  const absl::Status all = together([&] {
    head = create_here();
    if (!head.ok() || was_there || earlier == Earlier::kStay) return head.status();
    if (absl::Status marked = options_.checkpoints->MarkDeleted(name); !marked.ok()) {
      DropHead(name);
      head = marked;
    }
    return head.status();
  });
  if (!head.ok()) return all.ok() ? head.status() : all;
  const absl::StatusOr<std::shared_ptr<Head>> now = FindHere(name);
  if (all.ok() && now.ok() && *now == *head) return head;
  if (all.ok()) {
    return absl::UnavailableError(
        absl::StrCat("the replicas have met again while head ", name, " was created; create it again"));
  }
  // If a replica was lost, the next meeting decides about the head. The mark stays: a meeting may already
  // have seen the new head, and would restore the earlier one into it.
  if (!was_there && !IsReplicaLost(all)) DropHead(name);
  return all;
}

absl::StatusOr<std::shared_ptr<Head>> Engine::ReplaceHead(const HeadConfig& config) {
  const absl::StatusOr<std::shared_ptr<Head>> existing = FindHere(config.name);
  if (existing.ok() && (*existing)->config() != config) {
    std::promise<void> released;
    absl::Status removed =
        RemoveHead(config.name, DiscardGradient::kYes, [&released] { released.set_value(); });
    if (!removed.ok()) return removed;
    released.get_future().wait();
  }
  return CreateHere(config);
}

void Engine::DropHead(const std::string& name) {
  RemoveHead(name, DiscardGradient::kYes, [] {}).IgnoreError();
}

absl::Status Engine::CheckCreated(const HeadConfig& config) const {
  if (absl::Status status = CheckServing(); !status.ok()) return status;
  if (absl::Status status = Validate(config); !status.ok()) return status;
  if (config.fixed_segments && !device_->HasFixedSegments(config)) {
    return Invalid(RejectReason::kOption, "fixed_segments",
                   absl::StrCat("fixed_segments is true; device ", device_->name(),
                                " does not have them for ", kernels::Name(config.weight_type),
                                " weights (GPUs of compute capability 9.0 have them for bf16 and fp16, if "
                                "--workspace_bytes are enough): "
                                "create the head without"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Head>> Engine::CreateHere(const HeadConfig& config) {
  if (absl::Status can = CheckCreated(config); !can.ok()) return can;
  // One creation at a time; the map's lock is not held while memory is taken, which may need seconds.
  const MutexLock creating(create_mutex_);
  if (absl::Status back = BringBack(config.name); !back.ok()) return back;
  if (absl::StatusOr<std::shared_ptr<Head>> existing = FindHere(config.name); existing.ok()) {
    const HeadConfig& have = (*existing)->config();
    if (have == config) return existing;
    return MakeError(
        absl::StatusCode::kAlreadyExists, RejectReason::kConflict, "config",
        absl::StrCat("head ", config.name, " exists as ", Describe(have), "; asked for ", Describe(config),
                     Describe(have) == Describe(config) ? ", but others" : ""));
  }
  absl::StatusOr<std::shared_ptr<Head>> head = MakeHead(config);
  if (head.ok()) AddHead(*head);
  return head;
}

void Engine::AddHead(const std::shared_ptr<Head>& head) {
  const MutexLock lock(mutex_);
  heads_.emplace(head->config().name, head);
}

// Those that are parked as well.
int64_t Engine::OtherHeads(const std::string& name) const {
  const MutexLock lock(mutex_);
  return static_cast<int64_t>(heads_.size() + parked_.size() - heads_.count(name) - parked_.count(name));
}

absl::StatusOr<std::shared_ptr<Head>> Engine::MakeHead(const HeadConfig& config) {
  if (const int64_t count = OtherHeads(config.name); count >= options_.max_heads) {
    return Overload("config", absl::StrCat("there are ", count, " heads; the limit is ", options_.max_heads));
  }
  HeadShard shard = HeadShard::Whole(config.vocab_size);
  shard.replica = options_.place.replica;
  shard.replicas = options_.place.replicas;
  const bool shared = options_.place.shared();
  absl::StatusOr<MemoryPlan> plan = shared ? device_->PlanShard(config, shard) : device_->PlanMemory(config);
  if (!plan.ok()) return plan.status();
  // The host's memory, on any device.
  if (config.class_weights != nullptr) plan->push_back({"class_weights", config.class_weight_bytes()});
  auto reservation = budget_->Reserve(config.name, absl::StrCat("head ", config.name), *std::move(plan));
  if (!reservation.ok()) return reservation.status();
  absl::StatusOr<std::unique_ptr<HeadBackend>> backend =
      shared ? device_->CreateShard(config, shard) : device_->CreateHead(config);
  if (!backend.ok()) return backend.status();

  HeadEnvironment environment;
  environment.scheduler = &scheduler_;
  environment.device = device_.get();
  environment.counters = &counters_;
  environment.regions = &regions_;
  environment.find_head = [this](const std::string& name) { return FindHead(name); };
  environment.await_head = [this](const std::string& name, const Student& student) {
    return AwaitHead(name, student);
  };
  environment.heads = [this] { return Heads(); };
  environment.budget = budget_;
  environment.take_session_memory = [this](const HeadConfig& of) {
    const MutexLock creating(create_mutex_);
    return TakeMemory(of);
  };
  environment.limits = options_.chunk_limits;
  environment.place_timeout = options_.place_timeout;
  environment.incarnation = incarnation_;
  environment.place = options_.place;
  environment.end_together = options_.end_together;
  environment.publish_together = options_.publish_together;
  environment.find_part = options_.find_part;
  environment.device_done = device_done_;
  environment.keeps_checkpoints = options_.checkpoints != nullptr;
  absl::StatusOr<std::shared_ptr<StepSaver>> saver = MakeStepSaver(config, **backend);
  if (!saver.ok()) return saver.status();
  environment.step_saver = *std::move(saver);
  environment.on_step_save = [this](std::shared_ptr<Head> due, StepSaver::Due how) {
    OnStepSave(std::move(due), how);
  };
  if (config.double_buffer) {
    absl::StatusOr<std::unique_ptr<Gradient>> gradient = device_->CreateGradient(config);
    if (!gradient.ok()) return gradient.status();
    environment.second_gradient = *std::move(gradient);
  }
  environment.on_device_failure = [this](const absl::Status& status) { OnDeviceFailure(status); };
  return std::make_shared<Head>(config, std::move(environment), *std::move(backend), *std::move(reservation));
}

absl::Status Engine::DeleteHead(const std::string& name, DiscardGradient discard,
                                std::function<void()> released) {
  const MutexLock deleting(checkpoint_mutex_);  // no save would make it live again, no restore fill it
  const absl::StatusOr<bool> was_parked = DeleteParked(name, discard);
  if (!was_parked.ok()) return was_parked.status();
  if (*was_parked) {
    released();
    return absl::OkStatus();
  }
  if (options_.delete_together != nullptr) return DeleteAtAll(name, discard, released);
  return DeleteHere(name, discard, std::move(released));
}

absl::Status Engine::DeleteAtAll(const std::string& name, DiscardGradient discard,
                                 const std::function<void()>& released) {
  const MutexLock together(together_mutex_);
  const absl::StatusOr<std::shared_ptr<Head>> head = FindHere(name);
  if (head.ok()) {
    if (absl::Status may = (*head)->BeginDeletion(discard); !may.ok()) return may;
  }
  // The memory here is free again, and it is deleted at all others.
  const auto missing = std::make_shared<std::atomic<int>>(2);
  const auto one_less = [missing, released] {
    if (--*missing == 0) released();
  };
  const absl::StatusOr<bool> others =
      options_.delete_together(name, discard, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(checkpoint_mutex_) {
        if (head.ok()) return DeleteHere(name, discard, one_less);
        one_less();
        return absl::OkStatus();
      });
  if (head.ok()) (*head)->CancelDeletion();  // what is deleted stays so
  if (!others.ok()) return others.status();
  if (!head.ok() && !*others) return head.status();
  one_less();
  return absl::OkStatus();
}

absl::Status Engine::DeleteHere(const std::string& name, DiscardGradient discard,
                                std::function<void()> released) {
  if (options_.checkpoints == nullptr) return RemoveHead(name, discard, std::move(released));
  const absl::StatusOr<std::shared_ptr<Head>> head = FindHere(name);
  if (!head.ok()) return head.status();
  if (absl::Status may = (*head)->CheckDiscard(discard); !may.ok()) return may;
  // Its checkpoints stay, but no start brings it back. First: if this fails, nothing has changed.
  if (absl::Status marked = options_.checkpoints->MarkDeleted(name); !marked.ok()) return marked;
  absl::Status removed = RemoveHead(name, discard, std::move(released));
  // The head lives on: a chunk came meanwhile, whose gradient must not be discarded.
  if (!removed.ok()) options_.checkpoints->MarkLive(name).IgnoreError();
  return removed;
}

absl::Status Engine::RemoveHead(const std::string& name, DiscardGradient discard,
                                std::function<void()> released) {
  std::shared_ptr<Head> head;
  {
    const MutexLock lock(mutex_);
    const auto it = heads_.find(name);
    if (it == heads_.end()) return UnknownHead(name);
    const absl::Status deleted = MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownHead, "head",
                                           absl::StrCat("head ", name, " was deleted"));
    if (absl::Status status = it->second->MarkDeleted(deleted, discard); !status.ok()) return status;
    head = it->second;
    heads_.erase(it);
    awaited_.erase(name);
    for (auto session = sessions_.begin(); session != sessions_.end();) {
      if (session->second.head == head) {
        staging_reserved_ -= session->second.staging_bytes();
        session = sessions_.erase(session);
      } else {
        ++session;
      }
    }
  }
  head->Shutdown([this, released = std::move(released)] {
    ForgetFailures();
    released();
  });
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Head>> Engine::FindHead(const std::string& name) {
  const MutexLock lock(mutex_);
  const auto parked = parked_.find(name);
  if (parked == parked_.end()) {
    awaited_.erase(name);
    return FindHereLocked(name);
  }
  if (absl::Status begun = BeginReturnLocked(name, &parked->second); !begun.ok()) return begun;
  return ComingBack(name);
}

absl::StatusOr<std::shared_ptr<Head>> Engine::FindHere(const std::string& name) const {
  const MutexLock lock(mutex_);
  return FindHereLocked(name);
}

absl::StatusOr<std::shared_ptr<Head>> Engine::FindHereLocked(const std::string& name) const {
  if (const auto it = heads_.find(name); it != heads_.end()) return it->second;
  return parked_.contains(name) ? ComingBack(name) : UnknownHead(name);
}

void Engine::OnDeviceFailure(const absl::Status& status) {
  if (!device_failed_.exchange(true)) options_.on_device_failure(status);
}

void Engine::AwaitExchanges() {
  {
    // A running deletion, save or restore ends before the replicas compare their heads.
    const MutexLock quiet(checkpoint_mutex_);
  }
  std::promise<void> reached;
  std::future<void> exchanged = reached.get_future();
  scheduler_.Post(nullptr, [&reached] { reached.set_value(); });
  Await(exchanged);
  for (const std::shared_ptr<Head>& head : Heads()) {
    const auto reached_too = std::make_shared<std::promise<void>>();
    std::future<void> published = reached_too->get_future();
    head->AwaitPublished([reached_too] { reached_too->set_value(); });
    Await(published);
  }
}

std::vector<std::shared_ptr<Head>> Engine::Heads() const {
  const MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Head>> heads;
  heads.reserve(heads_.size());
  for (const auto& [name, head] : heads_) heads.push_back(head);
  return heads;
}

// Sessions

absl::StatusOr<OpenedSession> Engine::OpenSession(const std::string& head_name,
                                                  const SessionRequest& request) {
  if (absl::Status status = CheckServing(); !status.ok()) return status;
  if (absl::Status status = Check(request); !status.ok()) return status;
  if (absl::Status there = FindHead(head_name).status(); !there.ok()) return there;
  if (request.deterministic == Deterministic::kNo) return OpenSessionWith({}, nullptr, head_name, request);
  // The memory is taken before, and without the map's lock: it may need seconds.
  const MutexLock creating(create_mutex_);
  const absl::StatusOr<std::shared_ptr<Head>> of_memory = FindHere(head_name);
  if (!of_memory.ok()) return of_memory.status();
  absl::StatusOr<SessionMemory> memory = MemoryOf(**of_memory, request.client_key, request.rank);
  if (!memory.ok()) return memory.status();
  return OpenSessionWith(*std::move(memory), *of_memory, head_name, request);
}

absl::Status Engine::Check(const SessionRequest& request) const {
  if (request.client_key.empty() || request.client_key.size() > kMaxClientKey) {
    return Invalid(RejectReason::kOption, "client_key",
                   absl::StrCat("client_key has ", request.client_key.size(), " bytes; it must have 1 to ",
                                kMaxClientKey));
  }
  if (request.lanes < 1 || request.lanes > options_.max_lanes) {
    return Invalid(RejectReason::kOption, "lanes",
                   absl::StrCat("lanes is ", request.lanes, "; it must be in [1, ", options_.max_lanes, "]"));
  }
  const int64_t share = options_.head_staging_bytes;
  const int64_t most = share > 0 ? share : options_.staging_bytes;
  if (request.held_hidden_bytes >= 0 && request.held_hidden_bytes <= most) return absl::OkStatus();
  return Invalid(RejectReason::kOption, "held_hidden_bytes",
                 absl::StrCat("held_hidden_bytes is ", request.held_hidden_bytes, "; it must be in [0, ",
                              most, "] (", share > 0 ? "--head_staging_bytes" : "--staging_bytes", ")"));
}

absl::StatusOr<OpenedSession> Engine::OpenSessionWith(SessionMemory memory,
                                                      const std::shared_ptr<Head>& of_memory,
                                                      const std::string& head_name,
                                                      const SessionRequest& request) {
  const MutexLock lock(mutex_);
  const absl::StatusOr<std::shared_ptr<Head>> found = FindHereLocked(head_name);
  if (!found.ok()) return found.status();
  if (of_memory != nullptr && *found != of_memory) return UnknownHead(head_name);
  const std::shared_ptr<Head>& head = *found;
  const std::string new_id =
      options_.place.shared() ? SessionIdAt(options_.place.replica, RandomId()) : RandomId();
  absl::StatusOr<Head::SessionInfo> info = head->OpenSession(
      request.client_key, request.rank, request.lanes, new_id, request.deterministic, std::move(memory));
  if (absl::IsResourceExhausted(info.status())) {
    return Overload(FieldOf(info.status()), info.status().message());
  }
  if (!info.ok()) return info.status();
  const bool is_new = info->session_id == new_id;
  if (is_new) {
    if (absl::Status admission = AdmitLocked(*head, request); !admission.ok()) {
      head->CloseSession(new_id).IgnoreError();
      return admission;
    }
    AddSessionLocked(new_id, head, request.lanes);
  }
  return OpenedSession{head, *info, is_new, HoldLocked(*head, info->session_id, request.held_hidden_bytes)};
}

// Whether a new session's credit, and what it wants to hold, fit what is set aside for staging.
absl::Status Engine::AdmitLocked(const Head& head, const SessionRequest& request) {
  if (static_cast<int64_t>(sessions_.size()) >= options_.max_sessions) {
    return Overload("client_key", absl::StrCat("there are ", sessions_.size(), " sessions; the limit is ",
                                               options_.max_sessions));
  }
  const int64_t credit = CreditOf(request.lanes);
  if (const std::string obstacle = StagingObstacleLocked(head, credit); !obstacle.empty()) {
    return Overload("lanes", absl::StrCat("lanes is ", request.lanes, ", which takes a credit of ", credit,
                                          " bytes; ", obstacle, ", or take fewer lanes"));
  }
  const int64_t held = request.held_hidden_bytes;
  if (const std::string obstacle = StagingObstacleLocked(head, credit + held); !obstacle.empty()) {
    return Overload("held_hidden_bytes", absl::StrCat("held_hidden_bytes is ", held, ", beside a credit of ",
                                                      credit, " bytes; ", obstacle, ", or ask for less"));
  }
  return absl::OkStatus();
}

// Why a session of the head cannot have so many more bytes, and what to do; empty if it can.
std::string Engine::StagingObstacleLocked(const Head& head, int64_t bytes) const {
  const int64_t share = options_.head_staging_bytes;
  const int64_t free = LeftForSessions(options_.staging_bytes, staging_reserved_, row_streams_.Total().bytes);
  if (bytes > free) {
    return absl::StrCat(free, " of ", options_.staging_bytes,
                        " are free (--staging_bytes, --lane_credit_bytes): close a session");
  }
  if (share == 0) return "";
  const std::string& name = head.config().name;
  const int64_t taken = StagingOfLocked(&head);
  const int64_t rows = row_streams_.Of(name).bytes;
  if (bytes <= LeftForSessions(share, taken, rows)) return "";
  return absl::StrCat("sessions of head ", name, " have ", taken, ", and streams of its rows ", rows,
                      ", of the ", share,
                      " that are a head's share (--head_staging_bytes): close one of them");
}

void Engine::AddSessionLocked(const std::string& id, std::shared_ptr<Head> head, int32_t lanes) {
  const int64_t credit = CreditOf(lanes);
  sessions_.emplace(
      id, SessionEntry{std::move(head), std::make_shared<SessionCredit>(credit, &counters_.credit_bytes),
                       std::make_shared<HeldHiddenStates>(/*limit_bytes=*/0)});
  staging_reserved_ += credit;
}

// A session that was there before, perhaps in a checkpoint, gets what is free and otherwise keeps what it
// has. Returns that.
int64_t Engine::HoldLocked(const Head& head, const std::string& session_id, int64_t wanted) {
  const auto entry = sessions_.find(session_id);
  if (entry == sessions_.end()) return 0;
  HeldHiddenStates& held = *entry->second.held;
  const int64_t more = wanted - held.limit();
  if (more > 0 && StagingObstacleLocked(head, more).empty()) {
    held.Raise(wanted);
    staging_reserved_ += more;
  }
  return held.limit();
}

absl::StatusOr<SessionMemory> Engine::MemoryOf(Head& head, const std::string& client_key, int32_t rank) {
  const absl::StatusOr<bool> needed = head.NeedsGradient(client_key, rank);
  if (!needed.ok()) return needed.status();
  return *needed ? TakeMemory(head.config()) : SessionMemory();
}

absl::StatusOr<SessionMemory> Engine::TakeMemory(const HeadConfig& config) {
  SessionMemory memory;
  MemoryPlan plan = device_->PlanGradient(config);
  plan.push_back({"tiles", DeterministicTiles::KeptBytes(options_.chunk_limits, config.hidden_size)});
  auto reservation = budget_->Reserve(
      config.name, absl::StrCat("a deterministic session of head ", config.name), std::move(plan));
  if (!reservation.ok()) return reservation.status();
  memory.reservation = *std::move(reservation);
  absl::StatusOr<std::unique_ptr<Gradient>> gradient = device_->CreateGradient(config);
  if (!gradient.ok()) return gradient.status();
  memory.gradient = *std::move(gradient);
  return memory;
}

absl::Status Engine::CloseSession(const std::string& session_id) {
  return CloseSession(session_id, std::nullopt);
}

absl::Status Engine::CloseSession(const std::string& session_id, std::optional<absl::Time> idle_since) {
  std::shared_ptr<Head> head;
  {
    const MutexLock lock(mutex_);
    const auto it = sessions_.find(session_id);
    if (it == sessions_.end()) {
      return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                       absl::StrCat("session '", session_id, "' is not open"));
    }
    head = it->second.head;
  }
  // Closed at the head first: until then OpenSession may hand it out, which a later look at idle_since sees.
  if (absl::Status status = head->CloseSession(session_id, idle_since); !status.ok()) return status;
  const MutexLock lock(mutex_);
  if (const auto it = sessions_.find(session_id); it != sessions_.end()) {
    staging_reserved_ -= it->second.staging_bytes();
    sessions_.erase(it);
  }
  return absl::OkStatus();
}

absl::StatusOr<FoundSession> Engine::FindSession(const std::string& session_id,
                                                 const std::string& incarnation) const {
  if (incarnation != incarnation_) {
    const int32_t at = ReplicaOf(session_id, options_.place.replicas);
    const std::string why = at == options_.place.replica
                                ? ": it was restarted and its gradient window started empty"
                                : absl::StrCat(", of replica ", options_.place.replica, ": session ",
                                               session_id, " is at replica ", at,
                                               "; open its lanes at the address that OpenSession has named");
    absl::Status status =
        MakeError(absl::StatusCode::kAborted, RejectReason::kIncarnation, "incarnation",
                  absl::StrCat("incarnation is '", incarnation, "'; the server's is ", incarnation_, why));
    AttachPosition(&status, Position{incarnation_, 0, {}});
    return status;
  }
  const MutexLock lock(mutex_);
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) {
    return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownSession, "session_id",
                     absl::StrCat("session '", session_id, "' is not open; call OpenSession"));
  }
  return FoundSession{it->second.head, it->second.credit, it->second.held};
}

int64_t Engine::CreditOf(int32_t lanes) const {
  const int64_t lane = options_.lane_credit_bytes;
  const int64_t wanted = options_.session_credit_bytes > 0
                             ? options_.session_credit_bytes
                             : lane * std::min(kLanesOfCredit, options_.staging_bytes / lane);
  return lanes > wanted / lane ? std::max(wanted, lane) : lanes * lane;
}

int64_t Engine::StagingOfLocked(const Head* head) const {
  int64_t bytes = 0;
  for (const auto& [id, session] : sessions_) {
    if (session.head.get() == head) bytes += session.staging_bytes();
  }
  return bytes;
}

std::map<std::string, int64_t> Engine::StagingByHead() const {
  const MutexLock lock(mutex_);
  std::map<std::string, int64_t> staging;
  for (const auto& [name, head] : heads_) staging[name] = 0;
  for (const auto& [id, session] : sessions_) {
    staging[session.head->config().name] += session.staging_bytes();
  }
  return staging;
}

absl::Status Engine::CheckStreams(absl::string_view field) {
  const int64_t rows = row_streams_.Total().streams;
  if (counters_.live_streams + rows < options_.max_streams) return absl::OkStatus();
  return Overload(field, absl::StrCat("there are ", counters_.live_streams.load(), " Compute streams and ",
                                      rows, " streams of rows; the limit of both together is ",
                                      options_.max_streams, " (--max_streams)"));
}

absl::StatusOr<std::shared_ptr<const void>> Engine::TakeRowStream(const Head& head, int64_t bytes) {
  const std::string& name = head.config().name;
  const MutexLock lock(mutex_);  // nobody else looks for room meanwhile
  const RowStreamUsage of_head = row_streams_.Of(name);
  if (of_head.streams == 0) return row_streams_.Take(name, bytes);
  if (absl::Status streams = CheckStreams("head"); !streams.ok()) return streams;
  const int64_t rows = row_streams_.Total().bytes;
  if (bytes > LeftForRows(options_.staging_bytes, staging_reserved_, rows)) {
    return Overload("head", absl::StrCat("another stream of rows may hold ", bytes,
                                         " bytes; those under way, ", rows, ", and the credits of sessions, ",
                                         staging_reserved_, ", leave too little of ", options_.staging_bytes,
                                         " (--staging_bytes): read those that were begun to their ends"));
  }
  const int64_t share = options_.head_staging_bytes;
  const int64_t credits = share > 0 ? StagingOfLocked(&head) : 0;
  if (share > 0 && bytes > LeftForRows(share, credits, of_head.bytes)) {
    return Overload("head", absl::StrCat("another stream of rows may hold ", bytes, " bytes; those of head ",
                                         name, ", ", of_head.bytes, ", and the credits of its sessions, ",
                                         credits, ", leave too little of the ", share,
                                         " that are a head's share (--head_staging_bytes): read those that "
                                         "were begun to their ends"));
  }
  return row_streams_.Take(name, bytes);
}

int64_t Engine::staging_reserved() const {
  const MutexLock lock(mutex_);
  return staging_reserved_;
}

int64_t Engine::sessions() const {
  const MutexLock lock(mutex_);
  return static_cast<int64_t>(sessions_.size());
}

void Engine::ExpireSessions() {
  const absl::Time before = MonotonicNow() - options_.session_lease;
  for (const std::shared_ptr<Head>& head : Heads()) {
    for (const std::string& id : head->IdleSessions(before)) CloseSession(id, before).IgnoreError();
    head->ResumeStalled();
  }
}

void Engine::BeginDrain() {
  draining_ = true;
  for (const std::shared_ptr<Head>& head : Heads()) head->BeginDrain(CheckServing());
}

absl::Status Engine::Overload(absl::string_view field, absl::string_view message) {
  absl::Status status =
      MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOverload, field, message);
  AttachRetryDelay(&status, retry_slots_.Next(MonotonicNow()));
  return status;
}

absl::Status Engine::CheckServing() const {
  if (!draining_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, RejectReason::kDraining, "",
                   "the server is shutting down");
}

}  // namespace lossd::engine
