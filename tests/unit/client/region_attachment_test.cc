#include "client/src/regions/region_attachment.h"

#include <gtest/gtest.h>

#include <limits>

namespace lossd::internal::region_attachment_test {
namespace {

absl::StatusOr<v1::RegionAttachment> Parsed(const v1::RegionAttachment& attachment) {
  return ParseRegionAttachment(attachment.SerializeAsString());
}

v1::RegionAttachment OfBytes(int64_t bytes) {
  v1::RegionAttachment attachment;
  attachment.set_kind(v1::REGION_KIND_SYSTEM);
  attachment.set_bytes(bytes);
  return attachment;
}

TEST(RegionAttachmentTest, MemoryHasTheSizeThatTheServerSays) {
  const auto attachment = Parsed(OfBytes(4096));
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_EQ(attachment->bytes(), 4096);
}

TEST(RegionAttachmentTest, ARefusalIsTheServers) {
  v1::RegionAttachment refusal;
  refusal.set_code(static_cast<int>(absl::StatusCode::kPermissionDenied));
  refusal.set_message("not you");
  EXPECT_EQ(Parsed(refusal).status(), absl::PermissionDeniedError("not you"));
  refusal.set_code(-3);  // no code that there is
  EXPECT_EQ(Parsed(refusal).status().code(), absl::StatusCode::kUnknown);
}

TEST(RegionAttachmentTest, WhatIsNoSuchMessageIsRefused) {
  EXPECT_EQ(ParseRegionAttachment("\xff").status().code(), absl::StatusCode::kInternal);
}

// Offsets are calculated with it.
TEST(RegionAttachmentTest, ASizeThatNoMemoryHasIsRefused) {
  for (const int64_t bytes :
       {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min(), kMostRegionBytes + 1}) {
    EXPECT_EQ(Parsed(OfBytes(bytes)).status().code(), absl::StatusCode::kInternal) << bytes;
  }
  EXPECT_TRUE(Parsed(OfBytes(kMostRegionBytes)).ok());
}

}  // namespace
}  // namespace lossd::internal::region_attachment_test
