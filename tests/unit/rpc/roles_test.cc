#include "server/rpc/transport/roles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "server/rpc/calls/methods.h"

namespace lossd::rpc::roles_test {
namespace {

using ::testing::Contains;

TEST(RolesTest, EveryMethodOfEveryServiceHasALeastRoleThatATokenCanHave) {
  for (const std::string& method : MethodNames()) {
    const std::optional<Role> role = LeastRole(method);
    ASSERT_TRUE(role.has_value()) << method << " has no line in server/rpc/transport/roles.cc";
    EXPECT_NE(*role, Role::kAnybody) << method;
  }
  EXPECT_THAT(MethodNames(), Contains("HeadService/CreateHead"));
}

TEST(RolesTest, WhatIsNotInTheTableHasNoRole) {
  for (const char* method :
       {"", "HeadService", "HeadService/", "HeadService/createhead", "HeadService/CreateHead/",
        "/lossd.v1.HeadService/CreateHead", "grpc.health.v1.Health/Other"}) {
    EXPECT_EQ(LeastRole(method), std::nullopt) << method;
  }
}

TEST(RolesTest, HealthIsForEverybodyAndReflectionIsNot) {
  EXPECT_EQ(LeastRole("grpc.health.v1.Health/Check"), Role::kAnybody);
  EXPECT_EQ(LeastRole("grpc.health.v1.Health/Watch"), Role::kAnybody);
  EXPECT_EQ(LeastRole("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"), Role::kReadOnly);
}

TEST(MethodsTest, OnlyWholePathsOfKnownPackagesAreNames) {
  EXPECT_EQ(MethodOfPath("/lossd.v1.HeadService/DeleteHead"), "HeadService/DeleteHead");
  EXPECT_EQ(MethodOfPath("/grpc.health.v1.Health/Check"), "grpc.health.v1.Health/Check");
  for (const char* path :
       {"", "/", "/HeadService/DeleteHead", "/lossd.v1.", "/lossd.v1./DeleteHead", "/lossd.v1.HeadService/",
        "/lossd.v1.HeadService/DeleteHead/", "/lossd.v1.grpc.health.v1.Health/Check"}) {
    EXPECT_EQ(MethodOfPath(path), path);
    EXPECT_EQ(LeastRole(MethodOfPath(path)), std::nullopt) << path;
  }
  EXPECT_EQ(MethodOfPath("HeadService/DeleteHead"), "") << "it is no path";
}

TEST(RolesTest, NamesAreReadBackAndNobodyCanBeAnybody) {
  for (const Role role : {Role::kReadOnly, Role::kTrainer, Role::kAdmin}) {
    EXPECT_EQ(ParseRole(RoleName(role)), role);
  }
  EXPECT_EQ(ParseRole("anybody"), std::nullopt);
  EXPECT_EQ(ParseRole("Admin"), std::nullopt);
  EXPECT_EQ(ParseRole(""), std::nullopt);
}

}  // namespace
}  // namespace lossd::rpc::roles_test
