// Teachers on the CPU: hidden states as they arrive, and the room for them.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/linear_cross_entropy.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine::cpu_teaching_test {
namespace {

using kernels::DataType;

constexpr int64_t kVocab = 50;
constexpr int64_t kHidden = 8;
constexpr int64_t kTeacherHidden = 5;
constexpr int64_t kTokens = 6;

class CpuTeachingTest : public ::testing::Test {
 protected:
  void Create(int64_t workspace_bytes) {
    device_ = *CreateCpuDevice(workspace_bytes);
    student_ = Head("h", kHidden);
    teacher_ = Head("t", kTeacherHidden);
  }
  std::unique_ptr<HeadBackend> Head(const std::string& name, int64_t hidden) {
    const HeadConfig config{name, kVocab, hidden, DataType::kFloat32};
    std::unique_ptr<HeadBackend> head = *device_->CreateHead(config);
    HostBuffer weights = *HostBuffer::Create(config.weight_bytes(), Commit::kNow);
    for (int64_t i = 0; i < config.elements(); ++i) {
      reinterpret_cast<float*>(weights.data())[i] = static_cast<float>(i % 7) / 7;
    }
    EXPECT_TRUE(head->PublishWeights({std::move(weights)}).ok());
    return head;
  }
  // Losses, then dX.
  std::vector<float> Compute(const HiddenRows& teacher_hidden) {
    const std::vector<float> hidden(kTokens * kHidden, 0.5f);
    const std::vector<int64_t> labels = {0, 1, 2, 3, 4, 49};
    std::vector<float> results(kTokens * (1 + kHidden), -1.0f);
    ChunkRows rows;
    rows.tokens = kTokens;
    rows.hidden_states.data = hidden.data();
    rows.teacher_hidden = teacher_hidden;
    rows.labels = labels.data();
    rows.losses = results.data();
    rows.dx = results.data() + kTokens;
    BatchKey kind;
    kind.teacher = {.backend = teacher_.get(), .hidden_size = kTeacherHidden};
    student_->StartBatch(
        kind, {&rows, 1},
        {[](size_t) {}, [](const auto& report) { EXPECT_TRUE(report.ok()) << report.status(); }});
    return results;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<HeadBackend> student_;
  std::unique_ptr<HeadBackend> teacher_;
};

TEST_F(CpuTeachingTest, HiddenStatesMayComeInPiecesOrUnaligned) {
  Create(1 << 20);
  std::vector<float> values(kTokens * kTeacherHidden);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) / 10;
  const std::vector<float> expected = Compute({.data = values.data()});
  std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  const auto part = [&bytes](size_t first, size_t count) {
    return std::as_bytes(std::span(bytes).subspan(first, count));
  };
  const std::vector<ByteSpan> parts = {part(0, 7), part(7, 50), part(57, bytes.size() - 57)};
  EXPECT_EQ(Compute({.parts = parts}), expected);
  const std::string unaligned = "x" + bytes;
  EXPECT_EQ(Compute({.data = unaligned.data() + 1}), expected);
}

TEST_F(CpuTeachingTest, ATeacherThatTheWorkspaceHasNoRoomForIsRefusedByName) {
  // With fixed segments, which deterministic sessions have.
  const HeadShard whole = HeadShard::Whole(kVocab);
  const kernels::Shard shard = whole.For(kernels::Segments::kFixed);
  const kernels::TeacherSize teacher{kTeacherHidden, DataType::kFloat32};
  const int64_t plain = kernels::WorkspaceBytes(1, shard, kHidden, DataType::kFloat32, nullptr);
  const int64_t taught = kernels::WorkspaceBytes(1, shard, kHidden, DataType::kFloat32, &teacher);
  ASSERT_LT(plain, taught);
  Create(taught - 1);
  const absl::Status refused = student_->PrepareTeacher(*teacher_);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(refused), "options.distillation.teacher");
  EXPECT_NE(refused.message().find(std::to_string(taught)), std::string::npos) << refused;
  Create(taught);
  EXPECT_TRUE(student_->PrepareTeacher(*teacher_).ok());
}

}  // namespace
}  // namespace lossd::engine::cpu_teaching_test
