// Heads over replicas teach each other: while their weights change at one replica after the other, whatever
// is lost meanwhile, one version of the teacher gives one loss, and everybody learns on.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/replicas/faulty_exchanges.h"
#include "tests/unit/rpc/replicas/checkpointed_servers.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::joint_teaching_test {
namespace {

using engine::Chunk;
using engine::ChunkAnswer;
using engine::ComputeMode;
using engine::Engine;
using engine::Head;
using engine::HeadCopy;
using engine::Payload;
using engine::SessionMarks;
using engine::testing::ExchangeFaults;
using engine::testing::ReplicaServers;
using engine::testing::SetSize;
using kernels::collectives::Code;
using kernels::collectives::Result;
using lossd::testing::Await;
using replica_set_test::CheckpointedServers;
using replica_set_test::SetUnderTest;

constexpr int64_t kTokens = 5;

// The answer or the end of a stream that sends one chunk at a time.
class Stream : public engine::LaneListener {
 public:
  void OnAnswer(ChunkAnswer answer) override {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(answer);
    changed_.notify_all();
  }
  void OnApplied(uint64_t /*applied*/) override {}
  void OnEnd(absl::Status /*status*/) override {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  void Resume() {
    const std::lock_guard lock(mutex_);
    resumed_ = true;
    changed_.notify_all();
  }

  // False: the stream has ended.
  bool AwaitResumed() {
    std::unique_lock lock(mutex_);
    Await("a chunk to be submitted again", changed_, lock, [this] { return resumed_ || ended_; });
    resumed_ = false;
    return !ended_;
  }
  // None: the stream has ended.
  std::optional<ChunkAnswer> AwaitAnswer() {
    std::unique_lock lock(mutex_);
    Await("a chunk to be answered", changed_, lock, [this] { return answer_.has_value() || ended_; });
    return std::exchange(answer_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool resumed_ = false;
  bool ended_ = false;
  std::optional<ChunkAnswer> answer_;
};

// A client with one session, which sends the same tokens again and again.
class Student {
 public:
  Student(Engine* engine, std::string head, std::string teacher, ComputeMode mode)
      : engine_(*engine),
        head_(std::move(head)),
        teacher_(std::move(teacher)),
        mode_(mode),
        key_(absl::StrCat("of ", head_, " by ", teacher_, " at ", engine->options().place.replica)) {}

  // One chunk, and whatever comes between: it is answered. With `again` it is at first the last one, which
  // has been answered before.
  ChunkAnswer Learn(bool again = false) {
    std::optional<ChunkAnswer> answer;
    Await(key_, [&] {
      answer = TryToLearn(std::exchange(again, false));
      if (!answer.has_value()) lane_.reset();
      return answer.has_value();
    });
    EXPECT_EQ(answer->error, absl::OkStatus()) << key_;
    return *answer;
  }
  // Chunks that were taken.
  int sent() const { return sent_; }

 private:
  bool Open() {
    const auto opened = engine_.OpenSession(head_, {key_, 0, 1});
    if (!opened.ok()) return false;
    sequence_ = opened->info.lanes[0].accepted;
    of_ = opened->head;
    stream_ = std::make_shared<Stream>();
    absl::StatusOr<engine::LaneAttachment> lane = of_->AttachLane(opened->info.session_id, 0, stream_);
    if (!lane.ok()) return false;
    lane_ = *std::move(lane);
    return true;
  }
  std::optional<ChunkAnswer> TryToLearn(bool again) {
    if (!lane_.has_value() && !Open()) return std::nullopt;
    Chunk chunk = Tokens();
    if (again) --chunk.sequence;
    for (;;) {
      const auto taken = of_->Submit(*lane_, chunk, [stream = stream_] { stream->Resume(); });
      if (!taken.ok()) return std::nullopt;
      if (*taken == Head::Submission::kTaken) break;
      if (!stream_->AwaitResumed()) return std::nullopt;
    }
    if (!again) ++sequence_;
    ++sent_;
    return stream_->AwaitAnswer();
  }
  Chunk Tokens() const {
    const auto rows = [](float first) {
      std::vector<float> values;
      for (int64_t i = 0; i < kTokens * ReplicaServers::kHidden; ++i) {
        values.push_back(first + static_cast<float>(i % 7) / 4);
      }
      return Payload::Of(
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
    };
    Chunk chunk;
    chunk.sequence = sequence_ + 1;
    chunk.generation = of_->Info().generation;
    chunk.mode = mode_;
    chunk.tokens = kTokens;
    const std::vector<int64_t> labels = {1, 2, 3, 5, 8};
    chunk.labels.assign(reinterpret_cast<const char*>(labels.data()), labels.size() * sizeof(int64_t));
    chunk.hidden_states = rows(-0.5f);
    chunk.options.distillation =
        engine::ChunkDistillation{.teacher = teacher_, .loss = {.temperature = 2, .weight = 0.5f}};
    chunk.teacher_hidden = rows(-1);
    return chunk;
  }

  Engine& engine_;
  const std::string head_;
  const std::string teacher_;
  const ComputeMode mode_;
  const std::string key_;
  std::shared_ptr<Head> of_;
  std::shared_ptr<Stream> stream_;
  std::optional<engine::LaneAttachment> lane_;
  uint64_t sequence_ = 0;
  std::atomic<int> sent_ = 0;
};

// Runs students, each in a thread of its own, and compares their losses by version.
class School {
 public:
  void Teach(Engine* engine, const std::string& head, const std::string& teacher) {
    std::atomic<uint64_t>& learned = *learned_.emplace_back(std::make_unique<std::atomic<uint64_t>>(0));
    threads_.emplace_back([this, engine, head, teacher, &learned] {
      Student student(engine, head, teacher, ComputeMode::kLossOnly);
      while (!over_) {
        Note(absl::StrCat(head, " by ", teacher), student.Learn());
        ++learned;
      }
    });
  }
  // Every student gets an answer to what it sends from now on.
  void AwaitLearned() {
    for (const auto& learned : learned_) {
      const uint64_t before = *learned;
      Await("a student to learn", [&] { return *learned >= before + 2; });
    }
  }
  void End() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
    EXPECT_EQ(differing_, 0U) << "losses of the same weights, of so many answers in all: " << answers_;
  }

 private:
  void Note(const std::string& pair, const ChunkAnswer& answer) {
    const std::lock_guard lock(mutex_);
    ++answers_;
    const auto [first, is_new] =
        losses_.try_emplace({pair, answer.weight_version, answer.teacher_weight_version}, answer.losses);
    if (!is_new && first->second != answer.losses) ++differing_;
  }

  std::atomic<bool> over_ = false;
  std::vector<std::unique_ptr<std::atomic<uint64_t>>> learned_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::map<std::tuple<std::string, uint64_t, uint64_t>, std::string> losses_;
  uint64_t answers_ = 0;
  uint64_t differing_ = 0;
};

// "h" trains, and teaches a frozen head that is put back before it and one that comes after it; one of these
// teaches "h".
class JointTeachingTest : public ::testing::Test {
 protected:
  JointTeachingTest() {
    for (const char* const name : {"a", "z"}) {
      EXPECT_TRUE(
          servers_.engine()
              .CopyHead(
                  {.source = "h", .name = name, .training = HeadCopy::Training::kFrozen, .copy_id = name})
              .ok());
    }
    for (const char* const name : {"a", "h", "z"}) EXPECT_TRUE(Save(name).ok());
  }

  // Clients of so many replicas.
  void Begin(int32_t replicas) {
    for (int32_t replica = 0; replica < replicas; ++replica) {
      Engine& engine = servers_.all().at(replica).engine();
      trainers_.emplace_back(&engine, "h", "a", ComputeMode::kLossAndGradients);
      school_.Teach(&engine, "a", "h");
      school_.Teach(&engine, "z", "h");
      school_.Teach(&engine, "z", "a");
    }
  }

  absl::Status Save(const std::string& name) {
    return servers_.engine().SaveCheckpoint(name, absl::StrCat(++saved_)).status();
  }
  absl::Status Restore(const std::string& name) {
    return servers_.engine().RestoreCheckpoint(name, "").status();
  }
  absl::Status Step() {
    std::vector<SessionMarks> marks;
    uint64_t generation = 0;
    for (size_t replica = trainers_.size(); replica-- > 0;) {
      trainers_[replica].Learn();
      const auto head = servers_.all().at(static_cast<int32_t>(replica)).engine().FindHead("h");
      if (!head.ok()) return head.status();
      const engine::HeadInfo info = (*head)->Info();
      generation = info.generation;
      marks.insert(marks.end(), info.window_marks.begin(), info.window_marks.end());
    }
    const auto head = servers_.engine().FindHead("h");
    if (!head.ok()) return head.status();
    const auto answer = std::make_shared<std::promise<absl::Status>>();
    (*head)->ApplyStep(
        generation, marks, {.learning_rate = 1e-2},
        [answer](const absl::StatusOr<engine::StepResult>& step) { answer->set_value(step.status()); });
    return Await("a step", answer->get_future());
  }
  absl::Status Blend(const std::string& name) {
    const auto source = servers_.engine().FindHead("h");
    const auto target = servers_.engine().FindHead(name);
    if (!source.ok() || !target.ok()) return absl::UnavailableError("");
    const auto answer = std::make_shared<std::promise<absl::Status>>();
    (*target)->Blend(
        *source, {.source = "h", .decay = 0.5, .blend_id = absl::StrCat("blend ", ++saved_)},
        [answer](const absl::StatusOr<uint64_t>& version) { answer->set_value(version.status()); });
    return Await("a blend", answer->get_future());
  }
  absl::Status Do(int what) {
    switch (what % 7) {
      case 0:
      case 1:
        return Step();
      case 2:
        return Blend("a");
      case 3:
        return Save("a");
      case 4:
        return Blend("z");
      case 5:
        return Restore("h");
      default:
        return Restore("a");
    }
  }

  // Loses replicas while three calls run, and waits until every student is answered again.
  template <class Lose>
  void LoseIn(int round, Lose lose) {
    std::thread asks([&] {
      for (int more = 0; more < 3; ++more) Do(round + more).IgnoreError();
    });
    std::this_thread::sleep_for(std::chrono::microseconds(211 * round % 4000));
    lose();
    asks.join();
    servers_.set().AwaitWhole();
    school_.AwaitLearned();
  }

  const engine::CheckpointFolder folder_;
  CheckpointedServers servers_{SetSize{2}, ReplicaServers::AdamWHead(), folder_};
  uint64_t saved_ = 0;
  std::deque<Student> trainers_;
  School school_;
};

TEST_F(JointTeachingTest, OneVersionGivesOneLossWhileTheTeacherChanges) {
  Begin(2);
  for (int round = 0; round < 60; ++round) {
    EXPECT_EQ(Do(round), absl::OkStatus()) << "round " << round;
  }
  school_.AwaitLearned();
  school_.End();
}

TEST_F(JointTeachingTest, EverybodyLearnsOnWhateverIsCut) {
  Begin(2);
  for (int round = 0; round < 28; ++round) {
    LoseIn(round, [this] { servers_.set().proxy().CutAll(); });
  }
  school_.End();
}

TEST_F(JointTeachingTest, EverybodyLearnsOnWhoeverIsKilled) {
  Begin(1);
  for (int round = 0; round < 28; ++round) {
    LoseIn(round, [this] { servers_.set().Replace(1); });
  }
  school_.End();
}

// A head cannot go on, and its line at the device stands still with a chunk that "h" teaches.
class StandingStudentTest : public ::testing::Test {
 protected:
  StandingStudentTest() {
    set_.MeetAll();
    EXPECT_TRUE(engine().CopyHead({.source = "h", .name = "z", .copy_id = "z"}).ok());
    for (const char* const name : {"h", "z"}) EXPECT_TRUE(engine().SaveCheckpoint(name, "a").ok());
    student_.Learn();
  }
  ~StandingStudentTest() override {
    for (std::thread& thread : threads_) thread.join();
  }

  Engine& engine() { return set_.servers().at(0).engine(); }
  std::shared_ptr<Head> head(const std::string& name) { return *engine().FindHead(name); }
  void AwaitWhole() {
    Await("the set to be whole",
          [this] { return set_.set(0).Whole().ok() && engine().replicas().Read().epochs > 1; });
  }
  // Begins to send a chunk, and waits until it was taken.
  void Learn(bool again) {
    const int before = student_.sent();
    threads_.emplace_back([this, again] { student_.Learn(again); });
    Await("a chunk to be taken", [&] { return student_.sent() > before; });
  }
  // A step of "h".
  std::future<absl::Status> BeginStep() {
    set_.servers().at(0).Compute(7, 3);
    const auto answer = std::make_shared<std::promise<absl::Status>>();
    head("h")->ApplyStep(
        1, set_.servers().Marks(), {.learning_rate = 1e-2},
        [answer](const absl::StatusOr<engine::StepResult>& step) { answer->set_value(step.status()); });
    return answer->get_future();
  }

  const engine::CheckpointFolder folder_;
  std::array<ExchangeFaults, 2> faults_;
  SetUnderTest set_{SetSize{2},
                    replica_set_test::MasterHead(),
                    {},
                    {},
                    replica_set_test::KeptIn(folder_),
                    [this](int32_t replica, std::unique_ptr<engine::Device> device) {
                      return CreateFaultyDevice(std::move(device), &faults_[static_cast<size_t>(replica)]);
                    }};
  Student student_{&engine(), "z", "h", ComputeMode::kLossOnly};
  std::vector<std::thread> threads_;
};

TEST_F(StandingStudentTest, DoesNotKeepItsTeacherFromGoingBackFirst) {
  std::atomic<bool> hangs = false;
  faults_[0].Arm([&hangs](const std::function<bool()>& aborted) {
    hangs = true;
    Await("an exchange to be aborted", [&aborted] { return aborted(); });
    return Result(Code::kAborted, "aborted");
  });
  const auto blended = std::make_shared<std::promise<void>>();
  head("z")->Blend(head("h"), {.source = "h", .decay = 0.5, .blend_id = "blend"},
                   [blended](const absl::StatusOr<uint64_t>&) { blended->set_value(); });
  Await("an exchange to hang", [&] { return hangs.load(); });
  Learn(/*again=*/true);
  set_.Replace(1);
  AwaitWhole();
}

// Its restore waits for the device when its chunk comes.
TEST_F(StandingStudentTest, DoesNotKeepItsTeacherFromSteppingWhileItIsRestored) {
  faults_[0].HangDevice();
  const auto begun = std::make_shared<std::promise<absl::Status>>();
  head("z")->BeginRestorePart(
      [begun](const absl::StatusOr<engine::RestoringPart>& part) { begun->set_value(part.status()); });
  threads_.emplace_back([this] { student_.Learn(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for the chunk to be taken, if it can be
  faults_[0].GoOn();
  EXPECT_EQ(Await("a restore to begin", begun->get_future()), absl::OkStatus());
  EXPECT_EQ(Await("a step", BeginStep()), absl::OkStatus());
  head("z")->CancelRestorePart();
}

// Behind a step that hangs, with the head's line paused, it would wait for ever, and the replicas for it.
TEST_F(StandingStudentTest, IsNotNeededForARestoreToBeRefusedWhileItsTeacherSteps) {
  std::atomic<bool> hangs = false;
  faults_[0].Arm([&hangs](const std::function<bool()>& aborted) {
    hangs = true;
    Await("an exchange to be aborted", [&aborted] { return aborted(); });
    return Result(Code::kAborted, "aborted");
  });
  std::future<absl::Status> step = BeginStep();
  Await("an exchange to hang", [&] { return hangs.load(); });
  EXPECT_EQ(engine().RestoreCheckpoint("h", "a").status().code(), absl::StatusCode::kUnavailable);
  set_.Replace(1);
  AwaitWhole();
  Await("a step", std::move(step)).IgnoreError();
}

}  // namespace
}  // namespace lossd::rpc::joint_teaching_test
