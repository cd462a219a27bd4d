// The names of what a server can do, and what of them a request needs.
#include "proto/wire/features.h"

#include <gtest/gtest.h>

#include <optional>

#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::wire::features_test {
namespace {

Features Without(const std::string& name) {
  Features features = KnownFeatures();
  EXPECT_EQ(features.erase(name), 1U) << name;
  return features;
}

TEST(FeatureNames, OfAFieldThatIsSet) {
  EXPECT_FALSE(KnownFeatures().contains(""));
  v1::OpenSessionRequest request;
  EXPECT_FALSE(FindMissingFeature(request, Without("deterministic_sessions")).has_value());
  request.set_deterministic(true);
  EXPECT_FALSE(FindMissingFeature(request, KnownFeatures()).has_value());
  const auto missing = FindMissingFeature(request, Without("deterministic_sessions"));
  ASSERT_TRUE(missing.has_value());
  EXPECT_EQ(missing->name, "deterministic_sessions");
  EXPECT_EQ(missing->path, "deterministic");
}

TEST(FeatureNames, OfAMessageInsideMessages) {
  v1::Chunk chunk;
  chunk.mutable_options()->mutable_distillation()->set_teacher("large");
  const auto missing = FindMissingFeature(chunk, Without("distillation"));
  ASSERT_TRUE(missing.has_value());
  EXPECT_EQ(missing->name, "distillation");
  EXPECT_EQ(missing->path, "options.distillation");
  EXPECT_EQ(FindMissingFeature(chunk, Without("loss_options"))->path, "options");
  EXPECT_FALSE(FindMissingFeature(chunk, Without("regions")).has_value());
}

TEST(FeatureNames, OfAWholeRequest) {
  const auto missing = FindMissingFeature(v1::GradientStatsRequest(), Without("gradient_stats"));
  ASSERT_TRUE(missing.has_value());
  EXPECT_EQ(missing->path, "");
}

}  // namespace
}  // namespace lossd::wire::features_test
