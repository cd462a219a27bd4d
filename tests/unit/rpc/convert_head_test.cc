// Configurations of heads on their way from a message into the engine and back.
#include <gtest/gtest.h>

#include "server/rpc/convert/convert.h"

namespace lossd::rpc::convert_head_test {
namespace {

engine::HeadConfig Converted(const engine::HeadConfig& config) {
  v1::CreateHeadRequest request;
  ToProto(config, &request);
  const absl::StatusOr<engine::HeadConfig> converted = ToEngine(request);
  EXPECT_TRUE(converted.ok()) << converted.status();
  return *converted;
}

TEST(ConvertHeadTest, AConfigurationComesBackAsItWas) {
  engine::HeadConfig config{.name = "h", .vocab_size = 4, .hidden_size = 2};
  EXPECT_EQ(Converted(config), config);
  for (bool engine::HeadConfig::*const flag :
       {&engine::HeadConfig::bias, &engine::HeadConfig::master_weights, &engine::HeadConfig::double_buffer,
        &engine::HeadConfig::fixed_segments}) {
    engine::HeadConfig with = config;
    with.*flag = true;
    EXPECT_EQ(Converted(with), with) << engine::Describe(with);
    EXPECT_NE(Converted(with), config) << engine::Describe(with);
  }
  engine::HeadConfig holds = config;
  holds.held_bytes = int64_t{5} << 30;
  EXPECT_EQ(Converted(holds), holds) << engine::Describe(holds);
  EXPECT_NE(Converted(holds), config);
}

}  // namespace
}  // namespace lossd::rpc::convert_head_test
