// Options of a loss on their way from a message into the engine.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <gtest/gtest.h>

#include <utility>

#include "kernels/loss_options.h"
#include "server/rpc/convert/convert.h"

namespace lossd::rpc::convert_chunk_test {
namespace {

using google::protobuf::FieldDescriptor;

const FieldDescriptor* FieldOf(const kernels::LossOption& option) {
  return v1::LossOptions::descriptor()->FindFieldByName(option.name);
}

engine::ChunkOptions Converted(v1::LossOptions options) {
  wire::ReceivedRequest request;
  *request.message.mutable_chunk()->mutable_options() = std::move(options);
  return ToEngine(std::move(request)).options;
}

TEST(ConvertChunkTest, EveryOptionOfTheKernelsIsAFieldOfTheMessage) {
  for (const kernels::LossOption& option : kernels::kLossOptions) {
    ASSERT_NE(FieldOf(option), nullptr) << option.name;
    EXPECT_EQ(FieldOf(option)->cpp_type(), FieldDescriptor::CPPTYPE_FLOAT) << option.name;
  }
}

TEST(ConvertChunkTest, AnOptionThatIsSetIsTheChunksAndNoOther) {
  for (const kernels::LossOption& set : kernels::kLossOptions) {
    v1::LossOptions message;
    message.GetReflection()->SetFloat(&message, FieldOf(set), 0.75f);
    const engine::ChunkOptions options = Converted(message);
    for (const kernels::LossOption& option : kernels::kLossOptions) {
      const bool is_set = option.value == set.value;
      EXPECT_EQ(options.loss.*option.value, is_set ? 0.75f : kernels::LossOptions().*option.value)
          << option.name << " where " << set.name << " is set";
      EXPECT_EQ(options.IsSet(option.value), is_set || !FieldOf(option)->has_presence()) << option.name;
    }
  }
}

TEST(ConvertChunkTest, ASoftcapOfZeroIsTheChunksOwn) {
  v1::LossOptions message;
  message.set_softcap(0);
  EXPECT_TRUE(Converted(message).IsSet(&kernels::LossOptions::softcap));
  EXPECT_FALSE(Converted(v1::LossOptions()).IsSet(&kernels::LossOptions::softcap));
}

}  // namespace
}  // namespace lossd::rpc::convert_chunk_test
