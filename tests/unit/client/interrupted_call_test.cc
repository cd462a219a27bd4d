// Calls that wait for a server: what ends them when the caller no longer wants to, or the server is silent.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "lossd/client.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/support/wait.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::interrupted_call_test {
namespace {

using ::testing::HasSubstr;

using testing::Data;
using testing::FakeServer;
using testing::Fate;

using std::chrono::milliseconds;
using std::chrono::seconds;

class InterruptedCallTest : public testing::SessionTest {
 protected:
  ~InterruptedCallTest() override { LetGo(); }

  void Connect(ClientOptions options, const std::string& target = "") {
    options.interrupted = [this]() -> absl::Status {
      {
        const absl::MutexLock lock(&mutex_);
        threads_.push_back(std::this_thread::get_id());
      }
      return interrupted_ ? absl::CancelledError("enough") : absl::OkStatus();
    };
    client_ = Client::Connect(target.empty() ? fake_.target() : target, options).value();
    head_ = std::make_unique<Head>(client_->GetHead(FakeServer::kName).value());
  }

  // From chunk `sequence` on the server answers nothing at all, until LetGo.
  void FallSilentAt(uint64_t sequence) {
    fake_.on_chunk = [this, sequence](uint64_t arrived, int attempt) {
      if (arrived == sequence && attempt == 0) {
        silent_.set_value();
        testing::Await("LetGo", go_on_);  // with the lock that every call takes
      }
      return Fate::kTake;
    };
  }
  void LetGo() {
    if (!has_let_go_) go_on_.set_value();
    has_let_go_ = true;
  }

  absl::Mutex mutex_;
  std::vector<std::thread::id> threads_ ABSL_GUARDED_BY(mutex_);  // that were asked
  std::atomic<bool> interrupted_ = false;
  std::promise<void> silent_;
  std::promise<void> go_on_;
  bool has_let_go_ = false;
};

TEST_F(InterruptedCallTest, ACallThatNeedNotWaitAsksNobody) {
  Connect({});
  interrupted_ = true;
  EXPECT_TRUE(client_->Status().ok());
}

TEST_F(InterruptedCallTest, ABatchIsCutShortAndItsSessionIsOver) {
  for (const int32_t lanes : {1, 3}) {
    interrupted_ = false;
    Connect({});
    const std::string key = "trainer of " + std::to_string(lanes);
    Session session = Open(key, lanes);
    fake_.on_chunk = [this](uint64_t, int) {
      interrupted_ = true;
      return Fate::kStall;
    };
    fake_.stalled_until = [this] { return !interrupted_; };
    Data data(12);
    const absl::Status cut = session.Compute(data.batch(), data.outputs()).status();
    EXPECT_EQ(cut.code(), absl::StatusCode::kCancelled) << cut;
    const absl::Status again = session.Compute(data.batch(), data.outputs()).status();
    EXPECT_EQ(again.code(), absl::StatusCode::kCancelled);
    EXPECT_THAT(std::string(again.message()), HasSubstr("client_key '" + key + "'"));
    {
      const absl::MutexLock lock(&mutex_);
      for (const std::thread::id asked : threads_) EXPECT_EQ(asked, std::this_thread::get_id());
    }

    interrupted_ = false;
    fake_.on_chunk = nullptr;
    Session other = Open("other");  // its chunk lets the stalled ones go on
    Data one(1);
    EXPECT_TRUE(other.Compute(one.batch(), one.outputs()).ok());
  }
}

TEST_F(InterruptedCallTest, ACallWithoutTensorsIsCutShort) {
  Connect({});
  FallSilentAt(1);
  Session session = Open();
  auto computing = std::async(std::launch::async, [&] {
    Data data(2);
    return session.Compute(data.batch(), data.outputs()).status();
  });
  testing::Await("the silence", silent_);
  std::thread interrupter([this] {
    std::this_thread::sleep_for(milliseconds(300));
    interrupted_ = true;
  });
  EXPECT_EQ(client_->Status().status().code(), absl::StatusCode::kCancelled);
  interrupter.join();
  EXPECT_EQ(testing::Await("the batch", std::move(computing)).code(), absl::StatusCode::kCancelled);
}

TEST_F(InterruptedCallTest, ASilentServerIsNoticedWithinCallTimeout) {
  Connect({.call_timeout = seconds(1)});
  FallSilentAt(1);
  Session session = Open();
  Data data(2);
  const absl::Status silent = session.Compute(data.batch(), data.outputs()).status();
  EXPECT_EQ(silent.code(), absl::StatusCode::kDeadlineExceeded) << silent;
  EXPECT_THAT(std::string(silent.message()),
              HasSubstr("no answer within call_timeout (1 s) from " + fake_.target()));
  const absl::Status call = client_->Status().status();
  EXPECT_THAT(std::string(call.message()), HasSubstr("no answer within call_timeout (1 s)"));
  LetGo();
}

// A channel of gRPC may stop to connect, for ever. Here its connection is stalled before the first byte.
TEST_F(InterruptedCallTest, AConnectionThatNeitherComesNorFailsIsReplacedAfterCallTimeout) {
  for (const bool is_long : {false, true}) {
    testing::FaultProxy proxy(fake_.target(), [](int connection) {
      std::vector<testing::Fault> plan;
      if (connection == 1) {
        plan.push_back({.kind = testing::FaultKind::kStall, .time = std::chrono::hours(1)});
      }
      return plan;
    });
    Connect({.call_timeout = milliseconds(500), .reconnect_timeout = seconds(60)}, proxy.target());
    proxy.CutAll();
    const absl::Status ended = is_long ? head_->CommitFlush("1") : client_->Status().status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(ended)) << ended;
    const auto next = client_->Status();
    EXPECT_TRUE(next.ok()) << next.status();
  }
}

// A connection may need longer than a call has: the next one finds it made, instead of beginning again.
TEST_F(InterruptedCallTest, AConnectionThatIsSlowIsWaitedForByOneCallAfterTheOther) {
  std::atomic<bool> is_slow = false;
  testing::FaultProxy proxy(fake_.target(), [&](int /*connection*/) {
    std::vector<testing::Fault> plan;
    if (is_slow) plan.push_back({.kind = testing::FaultKind::kStall, .time = milliseconds(1200)});
    return plan;
  });
  Connect({.call_timeout = milliseconds(500)}, proxy.target());
  is_slow = true;
  proxy.CutAll();
  absl::Status ended;
  for (int call = 0; call < 20; ++call) {
    ended = client_->Status().status();
    if (ended.ok()) break;
  }
  EXPECT_TRUE(ended.ok()) << ended;
}

// Chunks may take as long as the device needs, and whoever is before them in the queue.
TEST_F(InterruptedCallTest, ABusyServerIsWaitedFor) {
  Connect({.call_timeout = seconds(1)});
  Session session = Open();
  std::atomic<bool> done = false;
  fake_.on_chunk = [&done](uint64_t, int) { return done ? Fate::kTake : Fate::kStall; };
  fake_.stalled_until = [&done] { return done.load(); };
  auto computing = std::async(std::launch::async, [&] {
    Data data(2);
    return session.Compute(data.batch(), data.outputs()).status();
  });
  std::this_thread::sleep_for(seconds(4));
  done = true;
  Session other = Open("other");
  Data one(1);
  EXPECT_TRUE(other.Compute(one.batch(), one.outputs()).ok());
  EXPECT_TRUE(testing::Await("the batch", std::move(computing)).ok());
}

}  // namespace
}  // namespace lossd::interrupted_call_test
