// Chunks that name regions, as any client of the protocol may send them, right or wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/regions/region_fixture.h"
#include "tests/support/wait.h"

namespace lossd::testing::regions_wire_test {
namespace {

using engine::RejectReason;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 64;
constexpr int64_t kHidden = 8;
constexpr int64_t kTokens = 16;
constexpr int64_t kBytes = kTokens * kHidden * 4;
constexpr int64_t kDxAt = 4096;
constexpr int64_t kRegionBytes = 8192;

class RegionsWireTest : public ::testing::Test {
 protected:
  void Start(const TestServerOptions& options = WithRegions()) {
    server_ = std::make_unique<TestServer>(options);
    stubs_ = std::make_unique<Stubs>(server_->Channel());
    CreateHead(*stubs_, "h", kVocab, kHidden);
    session_ = OpenSession(*stubs_, "h", "client");
    stream_ = std::make_unique<ComputeStream>(*stubs_, session_);
  }

  static v1::Chunk Payload(uint64_t sequence) {
    return MakeChunk(sequence, 1, kTokens, kVocab, kHidden, static_cast<uint32_t>(sequence));
  }
  // The same with its hidden states, and the place for dX, in the region.
  static v1::Chunk InRegion(const v1::Chunk& payload, const RawRegion& region) {
    v1::Chunk chunk = payload;
    region.Put(0, payload.hidden_states());
    chunk.clear_hidden_states();
    Set(chunk.mutable_hidden_states_region(), region.handle(), 0);
    Set(chunk.mutable_dx_region(), region.handle(), kDxAt);
    return chunk;
  }

  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Stubs> stubs_;
  v1::OpenSessionResponse session_;
  std::unique_ptr<ComputeStream> stream_;
};

TEST_F(RegionsWireTest, AChunkInARegionGivesTheBitsOfItsPayload) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  const v1::Chunk payload = Payload(1);
  const auto by_payload = stream_->Compute(payload);
  ASSERT_TRUE(by_payload.has_value());
  const WindowContent once = PeekWindow(*stubs_, "h");
  Flush(*stubs_, "h");

  v1::Chunk chunk = InRegion(payload, region);
  chunk.set_sequence(2);
  chunk.set_generation(2);
  const auto by_region = stream_->Compute(chunk);
  ASSERT_TRUE(by_region.has_value());
  EXPECT_EQ(by_region->disposition(), v1::DISPOSITION_ACCUMULATED) << by_region->error().message();
  EXPECT_TRUE(by_region->dx().empty());
  EXPECT_EQ(by_region->losses(), by_payload->losses());
  EXPECT_EQ(region.Get(kDxAt, kBytes), by_payload->dx());
  EXPECT_TRUE(PeekWindow(*stubs_, "h") == once);
}

TEST_F(RegionsWireTest, HiddenStatesAndDxMayBeInRegionsWithoutEachOther) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  const v1::Chunk payload = Payload(1);
  const auto by_payload = stream_->Compute(payload);
  ASSERT_TRUE(by_payload.has_value());

  v1::Chunk hidden_only = InRegion(payload, region);
  hidden_only.set_sequence(2);
  hidden_only.clear_dx_region();
  const auto with_dx = stream_->Compute(hidden_only);
  ASSERT_TRUE(with_dx.has_value());
  EXPECT_EQ(with_dx->dx(), by_payload->dx());

  v1::Chunk dx_only = payload;
  dx_only.set_sequence(3);
  Set(dx_only.mutable_dx_region(), region.handle(), kDxAt);
  const auto without_dx = stream_->Compute(dx_only);
  ASSERT_TRUE(without_dx.has_value());
  EXPECT_TRUE(without_dx->dx().empty());
  EXPECT_EQ(region.Get(kDxAt, kBytes), by_payload->dx());
}

TEST_F(RegionsWireTest, ARepeatWritesItsDxAgainAndAddsNothing) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  const v1::Chunk chunk = InRegion(Payload(1), region);
  ASSERT_TRUE(stream_->Compute(chunk).has_value());
  const std::string dx = region.Get(kDxAt, kBytes);
  const WindowContent once = PeekWindow(*stubs_, "h");
  region.Put(kDxAt, std::string(kBytes, '\0'));
  const auto again = stream_->Compute(chunk);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->disposition(), v1::DISPOSITION_REPEATED);
  EXPECT_EQ(region.Get(kDxAt, kBytes), dx);
  EXPECT_TRUE(PeekWindow(*stubs_, "h") == once);
}

// "Rejected" would say that it is in no window, and a correction would count it twice.
TEST_F(RegionsWireTest, ARepeatWhoseRegionIsGoneEndsTheStreamAndIsNotRejected) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  const v1::Chunk chunk = InRegion(Payload(1), region);
  ASSERT_TRUE(stream_->Compute(chunk).has_value());
  const WindowContent once = PeekWindow(*stubs_, "h");
  v1::DeleteRegionRequest remove;
  remove.set_handle(region.handle());
  v1::DeleteRegionResponse removed;
  grpc::ClientContext context;
  ASSERT_TRUE(stubs_->regions->DeleteRegion(&context, remove, &removed).ok());
  EXPECT_FALSE(stream_->Compute(chunk).has_value());
  const grpc::Status status = stream_->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("its region is gone"));
  EXPECT_TRUE(PeekWindow(*stubs_, "h") == once);
}

struct BadRef {
  std::string name;
  std::function<void(v1::Chunk&, const RawRegion&)> spoil;
  int code = 0;
  RejectReason reason = RejectReason::kRegion;
  std::string field;
  std::vector<std::string> message;
};

std::vector<BadRef> BadRefs() {
  const int invalid = grpc::StatusCode::INVALID_ARGUMENT;
  const auto hidden_at = [](int64_t offset) {
    return [offset](v1::Chunk& chunk, const RawRegion&) {
      chunk.mutable_hidden_states_region()->set_offset(offset);
    };
  };
  const auto dx_at = [](int64_t offset) {
    return [offset](v1::Chunk& chunk, const RawRegion&) { chunk.mutable_dx_region()->set_offset(offset); };
  };
  const std::string hidden = "hidden_states_region";
  const std::string dx = "dx_region";
  return {
      {"payload and region",
       [](v1::Chunk& chunk, const RawRegion&) { chunk.set_hidden_states(std::string(kBytes, 'x')); },
       invalid,
       RejectReason::kRegion,
       hidden,
       {"512", "only one"}},
      {"past the end",
       hidden_at(kRegionBytes - kBytes + 16),
       invalid,
       RejectReason::kRegion,
       hidden,
       {"512", "7696", "8192"}},
      {"dx past the end", dx_at(kRegionBytes - kBytes + 16), invalid, RejectReason::kRegion, dx, {"8192"}},
      {"offset that overflows",
       hidden_at(std::numeric_limits<int64_t>::max() - 15),
       invalid,
       RejectReason::kRegion,
       hidden,
       {"8192"}},
      {"dx offset that overflows",
       dx_at(std::numeric_limits<int64_t>::max() - 15),
       invalid,
       RejectReason::kRegion,
       dx,
       {"8192"}},
      {"negative offset", hidden_at(-16), invalid, RejectReason::kRegion, hidden, {"-16", "multiple of 16"}},
      {"smallest offset",
       dx_at(std::numeric_limits<int64_t>::min()),
       invalid,
       RejectReason::kRegion,
       dx,
       {"at least 0"}},
      {"misaligned", hidden_at(8), invalid, RejectReason::kRegion, hidden, {"is 8", "multiple of 16"}},
      {"dx misaligned", dx_at(4097), invalid, RejectReason::kRegion, dx, {"is 4097"}},
      {"dx over hidden states", dx_at(0), invalid, RejectReason::kRegion, dx, {"overlaps"}},
      {"dx over the end of hidden states",
       dx_at(kBytes - 16),
       invalid,
       RejectReason::kRegion,
       dx,
       {"overlaps", "[0, 512)"}},
      {"dx of loss only",
       [](v1::Chunk& chunk, const RawRegion&) { chunk.set_mode(v1::COMPUTE_MODE_LOSS_ONLY); },
       invalid,
       RejectReason::kRegion,
       dx,
       {"LOSS_ONLY"}},
      {"dx of dW alone",
       [](v1::Chunk& chunk, const RawRegion&) { chunk.set_mode(v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT); },
       invalid,
       RejectReason::kRegion,
       dx,
       {"LOSS_AND_WEIGHT_GRADIENT"}},
      {"handle of another length",
       [](v1::Chunk& chunk, const RawRegion&) {
         chunk.mutable_hidden_states_region()->set_handle("not a handle");
       },
       invalid,
       RejectReason::kUnknownRegion,
       hidden,
       {"12 bytes", "16"}},
      {"handle of nothing",
       [](v1::Chunk& chunk, const RawRegion&) {
         chunk.mutable_dx_region()->set_handle(std::string(16, 'x'));
       },
       grpc::StatusCode::NOT_FOUND,
       RejectReason::kUnknownRegion,
       dx,
       {"no such region", "CreateRegion"}},
      {"too many tokens for any region",
       [](v1::Chunk& chunk, const RawRegion&) { chunk.set_tokens(int64_t{1} << 62); },
       invalid,
       RejectReason::kChunkTooLarge,
       "tokens",
       {"4611686018427387904"}},
      {"more tokens than there is memory",
       [](v1::Chunk& chunk, const RawRegion&) { chunk.set_tokens(257); },
       invalid,
       RejectReason::kRegion,
       hidden,
       {"8224", "8192"}},
      {"infinite value",
       [](v1::Chunk&, const RawRegion& region) {
         const float infinity = std::numeric_limits<float>::infinity();
         region.Put(20, std::string(reinterpret_cast<const char*>(&infinity), sizeof(infinity)));
       },
       invalid,
       RejectReason::kNonFinite,
       "hidden_states",
       {"1 non-finite"}},
  };
}

TEST_F(RegionsWireTest, AWrongReferenceIsAnsweredInItsTurnAndAddsNothing) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  uint64_t sequence = 1;
  ASSERT_TRUE(stream_->Compute(InRegion(Payload(sequence), region)).has_value());
  const WindowContent good = PeekWindow(*stubs_, "h");
  for (const BadRef& bad : BadRefs()) {
    SCOPED_TRACE(bad.name);
    v1::Chunk chunk = InRegion(Payload(++sequence), region);
    bad.spoil(chunk, region);
    const uint64_t before = server_->rejected(bad.reason);
    const auto result = stream_->Compute(chunk);
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->disposition(), v1::DISPOSITION_REJECTED);
    EXPECT_EQ(result->error().code(), bad.code);
    EXPECT_EQ(result->error().field(), bad.field);
    for (const std::string& text : bad.message) EXPECT_THAT(result->error().message(), HasSubstr(text));
    EXPECT_EQ(server_->rejected(bad.reason), before + 1);
  }
  EXPECT_TRUE(PeekWindow(*stubs_, "h") == good);
  const auto after = stream_->Compute(InRegion(Payload(++sequence), region));
  ASSERT_TRUE(after.has_value());
  EXPECT_EQ(after->disposition(), v1::DISPOSITION_ACCUMULATED);
}

TEST_F(RegionsWireTest, ARegionCannotBeNamedBeforeItIsAttachedNorAfterItIsDeleted) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  v1::Chunk chunk = InRegion(Payload(1), region);
  const Created unattached = CreateRegion(*stubs_, kRegionBytes);
  ASSERT_TRUE(unattached.status.ok());
  chunk.mutable_hidden_states_region()->set_handle(unattached.region.handle());
  EXPECT_EQ(stream_->Compute(chunk)->error().code(), grpc::StatusCode::NOT_FOUND);

  v1::DeleteRegionRequest remove;
  remove.set_handle(region.handle());
  v1::DeleteRegionResponse removed;
  grpc::ClientContext context;
  ASSERT_TRUE(stubs_->regions->DeleteRegion(&context, remove, &removed).ok());
  chunk = InRegion(Payload(2), region);
  EXPECT_EQ(stream_->Compute(chunk)->error().code(), grpc::StatusCode::NOT_FOUND);
  Await("the lease to end", [&region] { return !region.lease().Alive(); });
  grpc::ClientContext again;
  EXPECT_EQ(stubs_->regions->DeleteRegion(&again, remove, &removed).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(RegionsWireTest, RegionsAreOffUnlessAskedFor) {
  Start({});
  const Created created = CreateRegion(*stubs_, kRegionBytes);
  EXPECT_EQ(created.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(created.status.error_message(), HasSubstr("--same_host_regions"));
  v1::Chunk chunk = Payload(1);
  Set(chunk.mutable_dx_region(), std::string(16, 'x'), 0);
  EXPECT_EQ(stream_->Compute(chunk)->error().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(ReservedForRegions(*stubs_), -1);
}

TEST_F(RegionsWireTest, ImpossibleRegionsAreRefusedWithTheReason) {
  Start(WithRegions(64 << 10, 16 << 10));
  const auto refuse = [this](int64_t bytes, v1::RegionKind kind, grpc::StatusCode code, const char* text) {
    const Created created = CreateRegion(*stubs_, bytes, kind);
    EXPECT_EQ(created.status.error_code(), code) << bytes;
    EXPECT_THAT(created.status.error_message(), HasSubstr(text));
  };
  const v1::RegionKind system = v1::REGION_KIND_SYSTEM;
  refuse(0, system, grpc::StatusCode::INVALID_ARGUMENT, "at least 1");
  refuse(-1, system, grpc::StatusCode::INVALID_ARGUMENT, "at least 1");
  refuse(std::numeric_limits<int64_t>::max(), system, grpc::StatusCode::RESOURCE_EXHAUSTED, "--region_bytes");
  refuse(32 << 10, system, grpc::StatusCode::RESOURCE_EXHAUSTED, "--region_client_bytes");
  refuse(4096, v1::REGION_KIND_UNSPECIFIED, grpc::StatusCode::INVALID_ARGUMENT, "kind is 0");
  refuse(4096, v1::REGION_KIND_DEVICE, grpc::StatusCode::FAILED_PRECONDITION, "no memory of its own");
  EXPECT_EQ(ReservedForRegions(*stubs_), 0);
}

TEST_F(RegionsWireTest, AProcessGetsNoMoreThanItsShare) {
  Start(WithRegions(64 << 10, 16 << 10));
  const RawRegion first(*stubs_, 8 << 10);
  EXPECT_EQ(ReservedForRegions(*stubs_), 8 << 10);
  {
    const RawRegion second(*stubs_, 8 << 10);
    const Created third = CreateRegion(*stubs_, 4 << 10);
    ASSERT_TRUE(third.status.ok());  // it is not yet known whose it will be
    const auto lease = internal::RegionLease::Attach(third.region.socket_path(), third.region.handle(),
                                                     std::chrono::seconds(60));
    EXPECT_TRUE(absl::IsResourceExhausted(lease.status()));
    EXPECT_THAT(lease.status().message(), HasSubstr("this process has the others"));
  }
  Await("regions to be reserved", [this] { return ReservedForRegions(*stubs_) == 12 << 10; });
  const RawRegion another(*stubs_, 8 << 10);
}

TEST_F(RegionsWireTest, RegionsComeOutOfTheMemoryBudget) {
  TestServerOptions options = WithRegions(1 << 30, 1 << 30);
  options.engine.memory_limit_bytes = 32 << 20;
  Start(options);
  const Created created = CreateRegion(*stubs_, 64 << 20);
  EXPECT_EQ(created.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(created.status.error_message(), HasSubstr("regions"));
  EXPECT_EQ(RegionsInUse(*server_), 0);
}

TEST_F(RegionsWireTest, ARegionTakesOneLeaseAndNoStrangers) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  const Created other = CreateRegion(*stubs_, kRegionBytes);
  const std::string& path = other.region.socket_path();
  const auto attach = [&path](const std::string& handle) {
    return internal::RegionLease::Attach(path, handle, std::chrono::seconds(60)).status();
  };
  EXPECT_TRUE(absl::IsAlreadyExists(attach(region.handle())));
  EXPECT_TRUE(absl::IsNotFound(attach(std::string(16, 'x'))));
  EXPECT_TRUE(absl::IsInvalidArgument(attach("x")));
  EXPECT_TRUE(absl::IsInvalidArgument(attach(std::string(1000, 'x'))));
  EXPECT_TRUE(region.lease().Alive());
  EXPECT_TRUE(attach(other.region.handle()).ok());
}

// Otherwise an access of the server's would end it.
TEST_F(RegionsWireTest, WhoHasARegionCanNeitherShrinkNorGrowIt) {
  Start();
  const RawRegion region(*stubs_, kRegionBytes);
  EXPECT_NE(ftruncate(region.lease().memory().get(), 0), 0);
  EXPECT_NE(ftruncate(region.lease().memory().get(), 1 << 20), 0);
}

TEST_F(RegionsWireTest, HandlesAreNeverTheSame) {
  Start();
  const RawRegion one(*stubs_, 1);
  const RawRegion two(*stubs_, 1);
  EXPECT_EQ(one.handle().size(), 16U);
  EXPECT_NE(one.handle(), two.handle());
  EXPECT_EQ(one.size(), 4096);
  EXPECT_EQ(one.Get(0, 4096), std::string(4096, '\0'));
}

}  // namespace
}  // namespace lossd::testing::regions_wire_test
