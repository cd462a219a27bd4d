// When a region ends, and that nothing of it stays behind: clients that die, leases that end, many at once.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lossd/client.h"
#include "server/rpc/transport/region_socket.h"
#include "tests/integration/regions/region_fixture.h"
#include "tests/support/program.h"
#include "tests/support/wait.h"

namespace lossd::testing::regions_lifetime_test {
namespace {

constexpr int64_t kVocab = 512;
constexpr int64_t kHidden = 64;

class RegionsLifetimeTest : public ::testing::Test {
 protected:
  explicit RegionsLifetimeTest(const TestServerOptions& options = WithRegions())
      : server_(options), stubs_(server_.Channel()) {
    CreateHead(stubs_, "h", kVocab, kHidden);
  }

  void AwaitNothingLeft() {
    Await("the regions to go", [this] { return RegionsInUse(server_) == 0; });
    EXPECT_EQ(ReservedForRegions(stubs_), 0);
    for (const engine::MemoryItem& item : server_.engine().ReservedMemory()) {
      if (item.purpose == "regions") {
        EXPECT_EQ(item.bytes, 0);
      }
    }
  }

  TestServer server_;
  Stubs stubs_;
};

TEST_F(RegionsLifetimeTest, AKilledClientsRegionGoesAlthoughItsChunksAreUnderWay) {
  for (int round = 0; round < 5; ++round) {
    const uint64_t before = server_.engine().counters().chunks_accumulated;
    Program client({REGION_WORKER, server_.target()});
    Await("chunks", [&] { return server_.engine().counters().chunks_accumulated > before + 20; });
    EXPECT_EQ(RegionsInUse(server_), 1);
    client.Signal(SIGKILL);
    EXPECT_EQ(client.AwaitEnd(), -SIGKILL);
    AwaitNothingLeft();
  }
}

// The memory stays until the chunk is done, and the chunk is answered.
TEST_F(RegionsLifetimeTest, AChunkUnderWayOutlivesItsLease) {
  const v1::OpenSessionResponse session = OpenSession(stubs_, "h", "client");
  ComputeStream stream(stubs_, session);
  constexpr int64_t kTokens = 256;
  for (uint64_t sequence = 1; sequence <= 20; ++sequence) {
    RawRegion region(stubs_, int64_t{2} * kTokens * kHidden * 4);
    v1::Chunk chunk = MakeChunk(sequence, 1, kTokens, kVocab, kHidden, 3);
    region.Put(0, chunk.hidden_states());
    chunk.clear_hidden_states();
    Set(chunk.mutable_hidden_states_region(), region.handle(), 0);
    Set(chunk.mutable_dx_region(), region.handle(), kTokens * kHidden * 4);
    ASSERT_TRUE(stream.Send(chunk));
    if (sequence % 2 == 0) std::this_thread::yield();
    region.EndLease();
    const auto result = stream.ReadResult(sequence);
    ASSERT_TRUE(result.has_value());
    // Taken, or too late; never anything else.
    EXPECT_TRUE(result->disposition() == v1::DISPOSITION_ACCUMULATED ||
                result->error().code() == grpc::StatusCode::NOT_FOUND)
        << result->error().message();
  }
  AwaitNothingLeft();
}

class ShortPatienceTest : public RegionsLifetimeTest {
 protected:
  static TestServerOptions Options() {
    TestServerOptions options = WithRegions();
    options.engine.regions.attach_timeout = absl::Milliseconds(50);
    return options;
  }
  ShortPatienceTest() : RegionsLifetimeTest(Options()) {}
};

TEST_F(ShortPatienceTest, ARegionThatNobodyAttachesGoes) {
  const Created created = CreateRegion(stubs_, 1 << 20);
  ASSERT_TRUE(created.status.ok());
  AwaitNothingLeft();
  const auto late = internal::RegionLease::Attach(created.region.socket_path(), created.region.handle(),
                                                  std::chrono::seconds(60));
  EXPECT_TRUE(absl::IsNotFound(late.status())) << late.status();
}

// Its pages were the server's to count: a client that keeps them mapped must not keep them in memory.
TEST_F(RegionsLifetimeTest, ADeletedRegionTakesNoMemoryThoughItIsStillMapped) {
  const RawRegion region(stubs_, 1 << 20);
  region.Put(0, "something");
  v1::DeleteRegionRequest remove;
  remove.set_handle(region.handle());
  v1::DeleteRegionResponse removed;
  grpc::ClientContext context;
  ASSERT_TRUE(stubs_.regions->DeleteRegion(&context, remove, &removed).ok());
  Await("the bytes to be set", [&region] { return region.Get(0, 9) == std::string(9, '\0'); });
}

TEST_F(RegionsLifetimeTest, HundredsOfRegionsComeAndGoUnderLoad) {
  std::atomic<bool> stop = false;
  std::thread load([this, &stop] {
    Stubs stubs(server_.Channel());
    ComputeStream stream(stubs, OpenSession(stubs, "h", "load"));
    const RawRegion region(stubs, int64_t{64} * kHidden * 4);
    for (uint64_t sequence = 1; !stop; ++sequence) {
      v1::Chunk chunk = MakeChunk(sequence, 1, 64, kVocab, kHidden, 3);
      region.Put(0, chunk.hidden_states());
      chunk.clear_hidden_states();
      Set(chunk.mutable_hidden_states_region(), region.handle(), 0);
      const auto result = stream.Compute(chunk);
      ASSERT_TRUE(result.has_value());
      ASSERT_EQ(result->disposition(), v1::DISPOSITION_ACCUMULATED);
    }
  });
  std::vector<std::thread> clients;
  for (uint32_t seed = 0; seed < 2; ++seed) {
    clients.emplace_back([this, seed] {
      auto client = Client::Connect(server_.target(), {});
      ASSERT_TRUE(client.ok());
      const auto head = (*client)->GetHead("h");
      ASSERT_TRUE(head.ok());
      auto session = head->OpenSession({.chunk_bytes = 4096});
      ASSERT_TRUE(session.ok());
      std::mt19937 random(seed);
      std::vector<Region> regions;
      const std::vector<int64_t> labels(48, 5);
      for (int step = 0; step < 100; ++step) {
        auto region = (*client)->CreateRegion(RegionKind::kSystem, 16384 + random() % (1 << 20));
        ASSERT_TRUE(region.ok()) << region.status();
        regions.push_back(*std::move(region));
        Region& used = regions[random() % regions.size()];
        const auto result = session->Compute({.labels = labels, .hidden_states = used.data()}, {});
        ASSERT_TRUE(result.ok()) << result.status();
        if (regions.size() > 5) std::swap(regions[random() % regions.size()], regions.back());
        if (regions.size() > 5) regions.pop_back();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  stop = true;
  load.join();
  AwaitNothingLeft();
}

TEST(RegionSocketTest, AServersSocketIsItsUsersAloneAndGoesWithIt) {
  std::string path;
  {
    TestServer server(WithRegions());
    path = server.server().region_socket_path();
    struct stat info {};
    ASSERT_EQ(stat(std::filesystem::path(path).parent_path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777U, 0700U);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(path).parent_path()));
}

TEST(RegionSocketTest, AFolderThatOthersCanLookIntoIsRefused) {
  std::string folder = (std::filesystem::temp_directory_path() / "lossd-test-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  auto device_options = WithRegions();
  device_options.server.region_socket_dir = folder;
  {
    const TestServer server(device_options);
    // A second one finds the socket in use.
    engine::RegionTable table({}, nullptr, nullptr);
    const auto second = rpc::RegionSocket::Start(folder, &table);
    EXPECT_TRUE(absl::IsFailedPrecondition(second.status()));
  }
  {
    // One that was left by a killed server is not.
    const TestServer first(device_options);
  }
  chmod(folder.c_str(), 0755);
  engine::RegionTable table({}, nullptr, nullptr);
  const auto refused = rpc::RegionSocket::Start(folder, &table);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status()));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace lossd::testing::regions_lifetime_test
