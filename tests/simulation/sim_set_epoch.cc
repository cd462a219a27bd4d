#include "tests/simulation/sim_set_epoch.h"

#include <utility>

#include "tests/simulation/sim_worker.h"

namespace lossd::simulation {

using kernels::collectives::Code;

namespace {

template <class Message>
void DropSome(Random& random, std::deque<Message>* messages) {
  messages->resize(static_cast<size_t>(random.Below(static_cast<int>(messages->size()) + 1)));
}

}  // namespace

SimSetEpoch::SimSetEpoch() : device_meeting_(MakeMeeting()), host_meeting_(MakeMeeting()) {
  for (size_t replica = 0; replica < kReplicas; ++replica) {
    devices_[replica] = MakeSimCommunicator(static_cast<int>(replica), &device_meeting_);
    hosts_[replica] = MakeSimCommunicator(static_cast<int>(replica), &host_meeting_);
    communicators_[replica] = {.device = devices_[replica].get(), .host = hosts_[replica].get()};
  }
}

SimMeeting SimSetEpoch::MakeMeeting() {
  const SimMeeting::Rank rank{[this] { return Comes(); }, [this](const auto& met) { return Waits(met); }};
  return {rank, rank};
}

Code SimSetEpoch::Comes() const {
  SimWorker::Await([this] { return !devices_cut_ || aborted_; });
  return aborted_ ? Code::kPeerLost : Code::kOk;
}

// It may fail for one, and not for the other one.
Code SimSetEpoch::Waits(const SimMeeting::Met& met) const {
  SimWorker::Await([&] { return met() || aborted_; });
  return aborted_ ? Code::kPeerLost : Code::kOk;
}

std::shared_ptr<const engine::ReplicaCommunicators> SimSetEpoch::communicators(int32_t replica) {
  return {shared_from_this(), &communicators_[static_cast<size_t>(replica)]};
}

void SimSetEpoch::Ask(int32_t /*replica*/, const std::string& name, std::string command,
                      rpc::Answers /*answers*/, rpc::RankAnswered done) {
  if (left_[0]) return done(absl::UnavailableError("the epoch is over"), std::string());
  const uint64_t number = ++last_number_;
  asked_[number] = std::move(done);
  if (cut_) return;
  commands_.push_back(
      {name, std::move(command), [self = shared_from_this(), number](absl::StatusOr<std::string> data) {
         if (self->cut_) return;
         self->answers_.push_back({number, std::move(data)});
       }});
}

SimSetEpoch::Command SimSetEpoch::NextCommand() {
  Command command = std::move(commands_.front());
  commands_.pop_front();
  return command;
}

bool SimSetEpoch::DeliverAnswer() {
  if (answers_.empty()) return false;
  const Answer answer = std::move(answers_.front());
  answers_.pop_front();
  auto asked = asked_.extract(answer.number);
  asked.mapped()(absl::OkStatus(), answer.data);
  return true;
}

void SimSetEpoch::Cut(Random& random) {
  cut_ = true;
  devices_cut_ = random.OneIn(2);
  DropSome(random, &commands_);
  DropSome(random, &answers_);
}

void SimSetEpoch::Lose(int32_t replica) {
  lost_[static_cast<size_t>(replica)] = true;
  aborted_ = true;
}

void SimSetEpoch::Leave(int32_t replica) {
  Lose(replica);
  cut_ = true;
  left_[static_cast<size_t>(replica)] = true;
  if (replica != 0) return commands_.clear();
  coordinated_->Close();
  answers_.clear();
  for (const auto& [number, done] : std::exchange(asked_, {})) {
    done(absl::UnavailableError("a replica was lost"), std::string());
  }
}

}  // namespace lossd::simulation
