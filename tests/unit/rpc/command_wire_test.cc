#include "server/rpc/group/command_wire.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lossd/group/v1/command.pb.h"

namespace lossd::rpc::command_wire_test {

using engine::GroupCommand;
using ::testing::FieldsAre;

template <class Command>
Command SentAndRead(const Command& command) {
  const absl::StatusOr<GroupCommand> read = ParseCommand(SerializeCommand(command));
  if (!read.ok() || !std::holds_alternative<Command>(*read)) {
    ADD_FAILURE() << read.status();
    return {};
  }
  return std::get<Command>(*read);
}

using google::protobuf::FieldDescriptor;

// Which fields of a public message commands have no use for.
const std::set<std::string> kNotOfCommands = {
    "lossd.v1.LossOptions.class_weights",
    "lossd.v1.LossOptions.z_gradient_scale",
    "lossd.v1.LossOptions.weight_version",
    "lossd.v1.LossOptions.returns",
    "lossd.v1.LossOptions.bias",
    "lossd.v1.LossOptions.distillation",
    "lossd.v1.Distillation.teacher",
    "lossd.v1.Distillation.hidden_dtype",
    "lossd.v1.Distillation.hidden_states_region",
};

void Fill(google::protobuf::Message* message);

// With a value that makes sense, and is none that it has by default.
void Fill(const FieldDescriptor& field, google::protobuf::Message* message) {
  const google::protobuf::Reflection& reflection = *message->GetReflection();
  if (field.is_repeated()) return Fill(reflection.AddMessage(message, &field));
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return Fill(reflection.MutableMessage(message, &field));
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(message, &field, field.number());
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.SetInt64(message, &field, field.number());
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.SetUInt64(message, &field, static_cast<uint64_t>(field.number()));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.SetFloat(message, &field, 0.25f);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.SetDouble(message, &field, 0.5);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(message, &field, true);
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.SetEnumValue(message, &field, 2);
    case FieldDescriptor::CPPTYPE_STRING:  // arrays of one token
      return reflection.SetString(message, &field, std::string(field.name() == "labels" ? 8 : 4, 'x'));
    default:
      ADD_FAILURE() << field.full_name() << " has a type that no field had";
  }
}

void Fill(google::protobuf::Message* message) {
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message->GetDescriptor()->field(i);
    if (!kNotOfCommands.contains(std::string(field.full_name()))) Fill(field, message);
  }
}

TEST(CommandWireTest, EveryFieldOfEveryCommandArrives) {
  const google::protobuf::OneofDescriptor& commands = *group::v1::Command::descriptor()->oneof_decl(0);
  for (int i = 0; i < commands.field_count(); ++i) {
    group::v1::Command sent;
    Fill(*commands.field(i), &sent);
    const absl::StatusOr<GroupCommand> command = ParseCommand(sent.SerializeAsString());
    ASSERT_TRUE(command.ok()) << sent.DebugString() << command.status();
    group::v1::Command read;
    ASSERT_TRUE(read.ParseFromString(SerializeCommand(*command)));
    EXPECT_EQ(read.DebugString(), sent.DebugString());
  }
}

engine::HeadConfig EveryOptionSet() {
  engine::HeadConfig config{"lm_head", 1003, 64, kernels::DataType::kFloat16};
  config.logit_scale = 0.25f;
  config.softcap = 30.0f;
  config.class_weights = std::make_shared<const std::vector<float>>(1003, 0.5f);
  config.bias = true;
  config.optimizer = {.kind = engine::OptimizerKind::kAdamW,
                      .weight_decay = 0.125,
                      .beta1 = 0.5,
                      .beta2 = 0.75,
                      .eps = 1e-6,
                      .maximize = true};
  config.master_weights = true;
  config.double_buffer = true;
  config.fixed_segments = true;
  return config;
}

TEST(CommandWireTest, AHeadArrivesWithEveryOption) {
  const auto read = SentAndRead(engine::CreateHeadCommand{7, EveryOptionSet(), {2, 3}});
  EXPECT_EQ(read.head, 7u);
  EXPECT_EQ(read.config, EveryOptionSet());
  EXPECT_THAT(read.replica, FieldsAre(2, 3));
  EXPECT_FALSE(ParseCommand(SerializeCommand(engine::CreateHeadCommand{7, EveryOptionSet(), {3, 3}})).ok());

  engine::HeadConfig frozen{"teacher", 3, 1, kernels::DataType::kBFloat16};
  frozen.weight_gradients = engine::WeightGradients::kFrozen;
  EXPECT_EQ(SentAndRead(engine::CreateGradientCommand{8, frozen}).config, frozen);
}

TEST(CommandWireTest, RowsArriveWithWhatTheyAre) {
  using engine::HeadRows;
  for (const HeadRows what :
       {HeadRows::kWeights, HeadRows::kBias, HeadRows::kGradient, HeadRows::kBiasGradient, HeadRows::kState,
        HeadRows::kSum, HeadRows::kBiasSum}) {
    const auto read = SentAndRead(
        engine::ReadRowsCommand{1, what, kernels::DataType::kBFloat16, 5, "exp_avg", 17, int64_t{1} << 40});
    EXPECT_THAT(read, FieldsAre(1u, what, kernels::DataType::kBFloat16, 5u, "exp_avg", 17, int64_t{1} << 40));
  }
  const auto written =
      SentAndRead(engine::WriteRowsCommand{2, HeadRows::kGradient, 3, true, "bias.exp_avg", 4, 5});
  EXPECT_THAT(written, FieldsAre(2u, HeadRows::kGradient, 3u, true, "bias.exp_avg", 4, 5));
}

TEST(CommandWireTest, WhatReplicasDoTogetherArrives) {
  EXPECT_THAT(SentAndRead(engine::SumSlicesCommand{1, 2, 3}), FieldsAre(1u, 2u, 3u));
  EXPECT_THAT(SentAndRead(engine::TallySumCommand{1, 0.25, 3}), FieldsAre(1u, 0.25, 3u));
  EXPECT_THAT(SentAndRead(engine::GatherSlicesCommand{1, 3}), FieldsAre(1u, 3u));
  EXPECT_THAT(SentAndRead(engine::AbortReplicasCommand{3}), FieldsAre(3u));
  const engine::StepArguments arguments{
      .learning_rate = 0.5, .optimizer = {.kind = engine::OptimizerKind::kAdamW, .beta1 = 0.25}, .step = 9};
  const auto stepped = SentAndRead(engine::StepSlicesCommand{1, arguments});
  EXPECT_EQ(stepped.head, 1u);
  EXPECT_EQ(stepped.arguments.learning_rate, 0.5);
  EXPECT_EQ(stepped.arguments.optimizer, arguments.optimizer);
  EXPECT_EQ(stepped.arguments.step, 9);
  const auto connected = SentAndRead(engine::ConnectReplicasCommand{
      4, {{1, 2}, "eth1", std::chrono::milliseconds(5), std::chrono::milliseconds(6)}});
  EXPECT_EQ(connected.connection, 4u);
  EXPECT_THAT(connected.network,
              FieldsAre(FieldsAre(1, 2), "eth1", std::chrono::milliseconds(5), std::chrono::milliseconds(6)));
}

TEST(CommandWireTest, WhatAHeadTakesOfAnotherArrives) {
  EXPECT_THAT(SentAndRead(engine::BlendWeightsCommand{1, 2, 0.999}), FieldsAre(1u, 2u, 0.999));
  EXPECT_THAT(SentAndRead(engine::CopyOptimizerCommand{1, 2}), FieldsAre(1u, 2u));
  for (const double decay : {1.0, -0.5, std::nan("")}) {
    const std::string bytes = SerializeCommand(engine::BlendWeightsCommand{1, 2, decay});
    EXPECT_FALSE(ParseCommand(bytes).ok()) << decay;
  }
}

// What is 0 by default on the wire is not 0 by default in the engine.
TEST(CommandWireTest, ZerosOfAnOptimizerStayZeros) {
  const engine::OptimizerConfig zeros{
      .kind = engine::OptimizerKind::kAdamW, .weight_decay = 0, .beta1 = 0, .beta2 = 0, .eps = 0};
  EXPECT_EQ(SentAndRead(engine::ApplyStepCommand{1, 2, {.optimizer = zeros}}).arguments.optimizer, zeros);
}

engine::StartBatchCommand BatchWithEverything() {
  engine::StartBatchCommand batch{.head = 1, .teacher = 2, .gradient = 3, .kind = {}, .chunks = {}};
  batch.kind = {.hidden_type = kernels::DataType::kBFloat16,
                .dx_type = kernels::DataType::kFloat16,
                .mode = engine::ComputeMode::kLossAndWeightGradient,
                .options = {0.5f, 30.0f, 0.125f, 1e-4f},
                .class_weights = engine::ClassWeights::kUse,
                .bias = engine::Bias::kUse,
                .returns = {true, false, true, false, true, false, true, 5},
                .segments = kernels::Segments::kFixed,
                .holder = 5};
  batch.kind.teacher = {.head_number = 2,
                        .hidden_size = 48,
                        .weight_type = kernels::DataType::kFloat16,
                        .hidden_type = kernels::DataType::kBFloat16,
                        .distillation = {kernels::Divergence::kJensenShannon, 0.25f, 2.0f, 0.75f, 0.5f}};
  batch.chunks.push_back({.tokens = 2,
                          .labels = std::string(2 * sizeof(int64_t), 'l'),
                          .ignore_index = std::numeric_limits<int64_t>::min(),
                          .gradient_scale = -0.5f,
                          .z_gradient_scale = 0.0f,
                          .token_weights = std::string(2 * sizeof(float), 'w'),
                          .lse_gradients = std::string(2 * sizeof(float), 'g'),
                          .entropy_gradients = std::string(2 * sizeof(float), 'e'),
                          .accumulate = false,
                          .input_gradient = true,
                          .payload = uint64_t{1} << 40});
  batch.chunks.push_back({.tokens = 1, .labels = std::string(sizeof(int64_t), '\0')});
  return batch;
}

TEST(CommandWireTest, ABatchArrivesWithItsKind) {
  const engine::StartBatchCommand sent = BatchWithEverything();
  const auto read = SentAndRead(sent);
  EXPECT_EQ(read.head, sent.head);
  EXPECT_EQ(read.teacher, sent.teacher);
  EXPECT_EQ(read.gradient, sent.gradient);
  EXPECT_EQ(read.kind, sent.kind);
}

TEST(CommandWireTest, ABatchArrivesWithItsChunks) {
  const engine::StartBatchCommand sent = BatchWithEverything();
  const auto read = SentAndRead(sent);
  ASSERT_EQ(read.chunks.size(), 2u);
  EXPECT_THAT(read.chunks[0], FieldsAre(2, sent.chunks[0].labels, std::numeric_limits<int64_t>::min(), -0.5f,
                                        std::optional<float>(0.0f), sent.chunks[0].token_weights,
                                        sent.chunks[0].lse_gradients, sent.chunks[0].entropy_gradients, false,
                                        true, uint64_t{1} << 40));
  EXPECT_THAT(read.chunks[1],
              FieldsAre(1, sent.chunks[1].labels, -100, 1.0f, std::nullopt, "", "", "", true, false, 0u));
}

TEST(CommandWireTest, NumbersThatNoCommandHasAreRefused) {
  const auto refused = [](const GroupCommand& command) {
    return absl::IsInvalidArgument(ParseCommand(SerializeCommand(command)).status());
  };
  engine::StartBatchCommand batch = BatchWithEverything();
  for (const int64_t tokens : {int64_t{0}, int64_t{-1}, int64_t{3}, std::numeric_limits<int64_t>::max()}) {
    batch.chunks.front().tokens = tokens;
    EXPECT_TRUE(refused(batch)) << tokens;
  }
  batch.chunks = {{.tokens = int64_t{1} << 61}};  // times 8 it is 0, as long as its labels
  EXPECT_TRUE(refused(batch));
  batch = BatchWithEverything();
  batch.kind.holder = -1;
  EXPECT_TRUE(refused(batch));
  EXPECT_TRUE(refused(engine::ReadRowsCommand{.head = 1, .first_row = -1}));
  EXPECT_TRUE(refused(engine::ReadRowsCommand{.head = 1, .rows = -1}));
  EXPECT_TRUE(refused(engine::WriteRowsCommand{.head = 1, .first_row = -1}));
  EXPECT_TRUE(refused(engine::WriteRowsCommand{.head = 1, .rows = -1}));
  EXPECT_TRUE(refused(engine::LogitsCommand{.head = 1, .rows = 0}));
  EXPECT_TRUE(refused(engine::LogitsCommand{.head = 1, .rows = 1, .top_k = -1}));
}

TEST(CommandWireTest, TheOtherCommandsArrive) {
  EXPECT_EQ(SentAndRead(engine::DeleteHeadCommand{9}).head, 9u);
  EXPECT_EQ(SentAndRead(engine::DeleteGradientCommand{9}).gradient, 9u);
  EXPECT_EQ(SentAndRead(engine::RestoreStateCommand{9}).head, 9u);
  EXPECT_EQ(SentAndRead(engine::ReleasePayloadCommand{uint64_t{1} << 60}).payload, uint64_t{1} << 60);
  EXPECT_THAT(SentAndRead(engine::ResetCommand{1, 2}), FieldsAre(1u, 2u));
  EXPECT_THAT(SentAndRead(engine::FoldCommand{1, 2, 3}), FieldsAre(1u, 2u, 3u));
  EXPECT_THAT(SentAndRead(engine::SummarizeCommand{1, 2, -3.5}), FieldsAre(1u, 2u, -3.5));
  EXPECT_THAT(SentAndRead(engine::PrepareTeacherCommand{1, 2}), FieldsAre(1u, 2u));
  SentAndRead(engine::ProbeCommand{});
  EXPECT_THAT(SentAndRead(engine::LogitsCommand{1, 2, 0.5f, 30.0f, engine::Bias::kUse,
                                                kernels::DataType::kBFloat16, true, 3}),
              FieldsAre(1u, 2, 0.5f, 30.0f, engine::Bias::kUse, kernels::DataType::kBFloat16, true, 3));
}

TEST(CommandWireTest, WhatIsNoCommandIsRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(ParseCommand("").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ParseCommand("\xff\xff\xff").status()));
  // A batch whose arrays are shorter than its chunks say would be read beyond their ends.
  engine::StartBatchCommand batch = BatchWithEverything();
  batch.chunks[0].labels.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(ParseCommand(SerializeCommand(batch)).status()));
  batch = BatchWithEverything();
  batch.chunks[0].token_weights.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(ParseCommand(SerializeCommand(batch)).status()));
}

}  // namespace lossd::rpc::command_wire_test
