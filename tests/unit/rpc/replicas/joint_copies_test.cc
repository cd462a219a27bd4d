// Heads are copied, and their weights blended, at all replicas or at none, with the bits of one server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/common/random_id.h"
#include "tests/support/wait.h"
#include "tests/unit/rpc/replicas/checkpointed_servers.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::joint_copies_test {
namespace {

using engine::BlendRequest;
using engine::Head;
using engine::HeadConfig;
using engine::HeadCopy;
using engine::testing::ReplicaServer;
using engine::testing::ReplicaServers;
using engine::testing::SetSize;
using kernels::DataType;
using replica_set_test::CheckpointedServers;
using replica_set_test::MasterHead;
using replica_set_test::SetUnderTest;
using ::testing::HasSubstr;

using Version = absl::StatusOr<uint64_t>;

struct Kind {
  const char* name;
  DataType type;
  bool master;  // of the source
  HeadCopy::Training training;
  HeadCopy::Master of_copy;
};
constexpr Kind kKinds[] = {
    {"fp32", DataType::kFloat32, false, HeadCopy::Training::kFrozen, HeadCopy::Master::kAsTrained},
    {"bf16", DataType::kBFloat16, false, HeadCopy::Training::kFrozen, HeadCopy::Master::kAsTrained},
    {"from a master", DataType::kBFloat16, true, HeadCopy::Training::kFrozen, HeadCopy::Master::kAsTrained},
    {"into a master", DataType::kBFloat16, false, HeadCopy::Training::kFrozen, HeadCopy::Master::kKept},
    {"both masters", DataType::kFloat16, true, HeadCopy::Training::kFrozen, HeadCopy::Master::kKept},
    {"that trains", DataType::kBFloat16, true, HeadCopy::Training::kAsSource, HeadCopy::Master::kAsTrained},
};

HeadConfig SourceOf(const Kind& kind) {
  HeadConfig config = ReplicaServers::AdamWHead();
  config.weight_type = kind.type;
  config.master_weights = kind.master;
  config.bias = true;
  return config;
}

// In the head's own type, as batches read them.
std::string WeightBits(Head& head) {
  const HeadConfig& config = head.config();
  std::string bytes(static_cast<size_t>(config.elements() * kernels::SizeOf(config.weight_type)), '\0');
  std::vector<float> bias(static_cast<size_t>(config.vocab_size));
  std::promise<Version> read;
  head.ReadWeights(0, config.vocab_size, config.weight_type,
                   {bytes.data(), config.bias ? bias.data() : nullptr},
                   [&read](const Version& version) { read.set_value(version); });
  EXPECT_TRUE(read.get_future().get().ok());
  bytes.append(reinterpret_cast<const char*>(bias.data()), bias.size() * sizeof(float));
  return bytes;
}

HeadCopy CopyOf(const Kind& kind) {
  return {.source = "h",
          .name = "copy",
          .training = kind.training,
          .master = kind.of_copy,
          .copy_id = "the copy"};
}

std::future<Version> BeginBlend(engine::Engine& engine, const BlendRequest& request) {
  const auto answer = std::make_shared<std::promise<Version>>();
  (*engine.FindHead("copy"))->Blend(*engine.FindHead(request.source), request, [answer](Version version) {
    answer->set_value(std::move(version));
  });
  return answer->get_future();
}
Version Blend(engine::Engine& engine, double decay, const std::string& id = engine::RandomId()) {
  return BeginBlend(engine, {.source = "h", .decay = decay, .blend_id = id}).get();
}

// Bits of the copy after each blend, in order; for one server and for replicas.
std::vector<std::string> BitsOf(engine::Engine& coordinator, const std::function<void(uint64_t seed)>& write,
                                const Kind& kind,
                                const std::function<std::string(const std::string&)>& read) {
  std::vector<std::string> bits;
  write(3);
  EXPECT_TRUE(coordinator.CopyHead(CopyOf(kind)).ok());
  bits.push_back(read("copy"));
  EXPECT_EQ(bits.back(), read("h")) << "a copy has the bits of its source";
  uint64_t seed = 4;
  for (const double decay : {0.75, 0.25, 1.0, 0.0}) {
    write(seed++);
    EXPECT_TRUE(Blend(coordinator, decay).ok()) << decay;
    bits.push_back(read("copy"));
  }
  return bits;
}

class JointCopiesTest : public ::testing::TestWithParam<SetSize> {};

TEST_P(JointCopiesTest, HaveTheBitsOfOneServer) {
  for (const Kind& kind : kKinds) {
    ReplicaServers one(1, SourceOf(kind));
    ReplicaServer& alone = one.at(0);
    const std::vector<std::string> expected = BitsOf(
        alone.engine(), [&](uint64_t seed) { alone.WriteWeights(seed); }, kind,
        [&](const std::string& name) { return WeightBits(**alone.engine().FindHead(name)); });

    SetUnderTest set(GetParam(), SourceOf(kind));
    set.MeetAll();
    const auto of_all = [&](const std::string& name) {
      const std::string first = WeightBits(**set.servers().at(0).engine().FindHead(name));
      for (int32_t replica = 1; replica < GetParam().replicas; ++replica) {
        EXPECT_EQ(WeightBits(**set.servers().at(replica).engine().FindHead(name)), first)
            << name << " at replica " << replica;
      }
      return first;
    };
    const std::vector<std::string> bits = BitsOf(
        set.servers().at(0).engine(), [&](uint64_t seed) { set.servers().at(0).WriteWeights(seed); }, kind,
        of_all);
    for (size_t i = 0; i < bits.size(); ++i) {
      EXPECT_TRUE(bits[i] == expected[i]) << kind.name << ", state " << i << " of the copy";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, JointCopiesTest, ::testing::Values(SetSize{2}, SetSize{3}, SetSize{2, 2}));

class CopiedHeadTest : public ::testing::Test {
 protected:
  CopiedHeadTest() {
    set_.MeetAll();
    EXPECT_TRUE(coordinator().CopyHead(CopyOf(kKinds[0])).ok());
  }

  engine::Engine& coordinator() { return set_.servers().at(0).engine(); }
  uint64_t VersionAt(int32_t replica, const std::string& name = "copy") {
    return (*set_.servers().at(replica).engine().FindHead(name))->weight_version();
  }

  SetUnderTest set_{2};
};

TEST_F(CopiedHeadTest, RepeatedCallsAnswerTheSame) {
  EXPECT_EQ(coordinator().CopyHead(CopyOf(kKinds[0]))->weight_version, 1U);
  HeadCopy another = CopyOf(kKinds[0]);
  another.copy_id = "another";
  EXPECT_EQ(coordinator().CopyHead(another).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(*Blend(coordinator(), 0.5, "a"), 2U);
  EXPECT_EQ(*Blend(coordinator(), 0.5, "a"), 2U);
  set_.MeetAgain();
  EXPECT_EQ(*Blend(coordinator(), 0.5, "a"), 2U);
  EXPECT_EQ(VersionAt(1), 2U);
}

TEST_F(CopiedHeadTest, ABlendIsRepeatedThoughItsSourceHasGoneOn) {
  const BlendRequest request{.source = "h", .decay = 0.5, .blend_id = "a", .source_version = 1};
  EXPECT_EQ(*BeginBlend(coordinator(), request).get(), 2U);
  set_.servers().at(0).WriteWeights(9);
  EXPECT_EQ(*BeginBlend(coordinator(), request).get(), 2U);
  BlendRequest another = request;
  another.blend_id = "b";
  EXPECT_THAT(std::string(BeginBlend(coordinator(), another).get().status().message()),
              HasSubstr("source_version is 1"));
}

TEST_F(CopiedHeadTest, ACopyAndABlendOfOneIdAreTwoCalls) {
  const HeadCopy copy = CopyOf(kKinds[0]);
  EXPECT_EQ(*Blend(coordinator(), 0.5, copy.copy_id), 2U);
  EXPECT_EQ(coordinator().CopyHead(copy).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(CopiedHeadTest, ABlendDoesNotWaitForTheEndOfAFlush) {
  const auto flush = set_.servers().Flush(1);
  ASSERT_TRUE(flush.ok()) << flush.status();
  const auto answer = std::make_shared<std::promise<Version>>();
  (*coordinator().FindHead("h"))
      ->Blend(*coordinator().FindHead("copy"), {.source = "copy", .decay = 0.5, .blend_id = "a"},
              [answer](Version version) { answer->set_value(std::move(version)); });
  const Version version = testing::Await("the refusal", *answer);
  EXPECT_THAT(std::string(version.status().message()), HasSubstr("is sealed by a flush"));
  EXPECT_TRUE(set_.servers().Abort(flush->flush_id).ok());
}

// A step, a blend and a copy that are asked for together happen in one order at both replicas.
TEST_F(CopiedHeadTest, AreOfOneVersionWhileTheirSourceIsStepped) {
  for (uint64_t generation = 1; generation <= 8; ++generation) {
    set_.servers().at(0).Compute(generation, 3, generation);
    set_.servers().at(1).Compute(generation + 100, 2, generation);
    auto stepped = set_.servers().BeginStep(generation, set_.servers().Marks(), {.learning_rate = 0.1});
    auto blended = BeginBlend(coordinator(), {.source = "h", .decay = 0.5, .blend_id = engine::RandomId()});
    const auto copied = coordinator().CopyHead({.source = "h",
                                                .name = absl::StrCat("of-", generation),
                                                .training = HeadCopy::Training::kFrozen,
                                                .copy_id = "id"});
    ASSERT_TRUE(copied.ok()) << copied.status();
    ASSERT_TRUE(ReplicaServers::Answer(std::move(stepped)).ok());
    ASSERT_TRUE(blended.get().ok());
    for (const std::string& name : {std::string("copy"), absl::StrCat("of-", generation)}) {
      EXPECT_EQ(WeightBits(**set_.servers().at(1).engine().FindHead(name)),
                WeightBits(**coordinator().FindHead(name)));
      EXPECT_EQ(VersionAt(0, name), VersionAt(1, name));
    }
  }
}

TEST_F(CopiedHeadTest, RefusedBlendsChangeNothing) {
  const std::string before = WeightBits(**coordinator().FindHead("copy"));
  const auto blend = [&](const std::string& target, const BlendRequest& request) {
    const auto answer = std::make_shared<std::promise<Version>>();
    (*coordinator().FindHead(target))
        ->Blend(*coordinator().FindHead(request.source), request,
                [answer](Version version) { answer->set_value(std::move(version)); });
    return answer->get_future().get().status();
  };
  const struct {
    std::string target;
    BlendRequest request;
    const char* words;
  } rows[] = {
      {"copy", {.source = "copy", .decay = 0.5, .blend_id = "1"}, "source is copy, which is the target too"},
      {"copy", {.source = "h", .decay = 2, .blend_id = "2"}, "decay is 2"},
      {"copy", {.source = "h", .decay = 0.5, .blend_id = "3", .source_version = 7}, "source_version is 7"},
      {"copy", {.source = "h", .decay = 0.5, .blend_id = "4", .target_version = 7}, "target_version is 7"},
      {"h", {.source = "copy", .decay = 0.5, .blend_id = "5"}, "the window of head h is not empty"},
  };
  set_.servers().at(1).Compute(7, 3);  // in the window of the other replica alone
  for (const auto& row : rows) {
    EXPECT_THAT(std::string(blend(row.target, row.request).message()), HasSubstr(row.words));
  }
  EXPECT_EQ(WeightBits(**coordinator().FindHead("copy")), before);
  EXPECT_EQ(VersionAt(0, "h"), 1U);
  EXPECT_EQ(VersionAt(1, "h"), 1U);
  // The windows are open again.
  EXPECT_TRUE(set_.servers().Step(1, {.learning_rate = 0.1}).ok());
}

// The source of a blend is published at one replica after the other, or restored.
class BlendedMeanwhileTest : public ::testing::Test {
 protected:
  BlendedMeanwhileTest() {
    EXPECT_TRUE(servers_.engine().CopyHead(CopyOf(kKinds[4])).ok());
    EXPECT_TRUE(servers_.engine().SaveCheckpoint("h", "a").ok());
  }

  // Blends and copies, again and again, while `change` changes the source.
  void BlendWhile(const std::function<void(uint64_t round)>& change) {
    constexpr uint64_t kRounds = 25;
    std::atomic<bool> over = false;
    std::thread changes([&] {
      for (uint64_t round = 0; !over; ++round) change(round);
    });
    uint64_t asked = 0;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const std::string id = absl::StrCat(round);
      const auto blended = SetUnderTest::UntilAnswered([&] {
        ++asked;
        return BeginBlend(servers_.engine(), {.source = "h", .decay = 0.5, .blend_id = id});
      });
      EXPECT_TRUE(blended.ok()) << blended.status();
      HeadCopy copy = CopyOf(kKinds[4]);
      copy.name = absl::StrCat("of-", round);
      absl::Status copied = absl::UnavailableError("");
      while (absl::IsUnavailable(copied)) copied = servers_.engine().CopyHead(copy).status();
      EXPECT_EQ(copied, absl::OkStatus());
      for (const std::string& name : {std::string("copy"), copy.name}) {
        EXPECT_TRUE(WeightBits(**servers_.all().at(1).engine().FindHead(name)) ==
                    WeightBits(**servers_.engine().FindHead(name)))
            << name;
      }
      EXPECT_TRUE(servers_.engine().DeleteHead(copy.name, Head::DiscardGradient::kYes).ok());
    }
    over = true;
    changes.join();
    // None of them was put back with the source.
    EXPECT_EQ((*servers_.engine().FindHead("copy"))->weight_version(), 1 + kRounds) << asked << " calls";
  }

  const engine::CheckpointFolder folder_;
  CheckpointedServers servers_{SetSize{2}, MasterHead(), folder_};
};

TEST_F(BlendedMeanwhileTest, AreAlikeWhileTheirSourceIsWritten) {
  BlendWhile([this](uint64_t round) {
    servers_.all().at(0).WriteWeights(round);
    servers_.all().at(0).ComputeLosses(round, 20, 1);  // what is published waits behind it
  });
}

TEST_F(BlendedMeanwhileTest, AreAlikeWhileTheirSourceIsPutBack) {
  BlendWhile([this](uint64_t /*round*/) {
    const absl::Status restored = servers_.engine().RestoreCheckpoint("h", "a").status();
    EXPECT_TRUE(restored.ok() || absl::IsUnavailable(restored)) << restored;
  });
}

// A replica is cut off meanwhile: all have the copy, or none, when they have met again.
TEST(CopiesOfCheckpointedHeads, AreAtAllOrAtNoneWhateverIsCut) {
  const engine::CheckpointFolder folder;
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
  ASSERT_TRUE(servers.engine().CopyHead(CopyOf(kKinds[4])).ok());
  ASSERT_TRUE(servers.engine().SaveCheckpoint("h", "a").ok());
  ASSERT_TRUE(servers.engine().SaveCheckpoint("copy", "a").ok());
  const auto until_answered = [&](auto ask) {
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      const auto answer = ask();
      // A head goes back to its checkpoint, or is no longer there, if it was made at one of them alone.
      if (!absl::IsUnavailable(answer.status()) && !absl::IsNotFound(answer.status())) return answer.status();
    }
  };
  const auto blend = [&](const std::string& id) -> Version {
    const auto target = servers.engine().FindHead("copy");
    if (!target.ok() || !servers.engine().FindHead("h").ok()) return target.status();
    return Blend(servers.engine(), 0.5, id);
  };
  for (int tried = 0; tried < 20; ++tried) {
    std::thread cuts([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(150 * tried));
      servers.set().proxy().CutAll();
    });
    const HeadCopy copy{.source = "h",
                        .name = absl::StrCat("try-", tried),
                        .training = HeadCopy::Training::kFrozen,
                        .copy_id = "id"};
    EXPECT_EQ(until_answered([&] { return servers.engine().CopyHead(copy); }), absl::OkStatus());
    EXPECT_EQ(until_answered([&] { return blend(absl::StrCat("blend ", tried)); }), absl::OkStatus());
    cuts.join();
    servers.set().AwaitWhole();
    std::map<std::string, std::string> bits;
    for (const std::shared_ptr<Head>& head : servers.engine().Heads()) {
      bits[head->config().name] = WeightBits(*head);
    }
    for (const std::shared_ptr<Head>& head : servers.all().at(1).engine().Heads()) {
      const std::string& name = head->config().name;
      EXPECT_TRUE(bits.count(name) == 1 && bits[name] == WeightBits(*head)) << name << ", try " << tried;
      bits.erase(name);
    }
    EXPECT_TRUE(bits.empty()) << "at the coordinator alone: " << bits.begin()->first;
    absl::Status deleted = absl::UnavailableError("");
    while (absl::IsUnavailable(deleted)) {
      deleted = servers.engine().DeleteHead(copy.name, Head::DiscardGradient::kYes);
    }
    EXPECT_EQ(deleted, absl::OkStatus());
  }
}

// A master that nobody steps is kept in slices as well.
TEST(CopiesOfCheckpointedHeads, ComeBackWithAllRows) {
  const engine::CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  ASSERT_TRUE(servers.engine().CopyHead(CopyOf(kKinds[4])).ok());
  servers.all().at(0).WriteWeights(9);
  ASSERT_TRUE(Blend(servers.engine(), 0.5).ok());
  const std::string saved = WeightBits(**servers.engine().FindHead("copy"));
  ASSERT_TRUE(servers.engine().SaveCheckpoint("copy", "a").ok());
  ASSERT_TRUE(Blend(servers.engine(), 0.5).ok());
  ASSERT_TRUE(servers.engine().RestoreCheckpoint("copy", "a").ok());
  for (int32_t replica = 0; replica < 3; ++replica) {
    EXPECT_TRUE(WeightBits(**servers.all().at(replica).engine().FindHead("copy")) == saved)
        << "at replica " << replica;
  }
}

}  // namespace
}  // namespace lossd::rpc::joint_copies_test
