// Soft targets through the engine on a GPU: wherever the teacher's hidden states lie and however batches are
// gathered, every chunk gets the bits of one that holds everything.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/engine/device/cuda/cuda_pipeline.h"
#include "tests/gpu/cuda_engine.h"
#include "tests/support/wait.h"
#include "tests/unit/kernels/cpu_results.h"

namespace lossd::engine::cuda_teaching_test {
namespace {

using kernels::DataType;
using kernels::SizeOf;
using kernels::testing::CpuResultsInFloat32;
using kernels::testing::Problem;
using kernels::testing::RandomProblem;
using kernels::testing::RandomTeacher;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;

constexpr int64_t kTokens = 1300;
constexpr int64_t kVocab = 700;
constexpr int64_t kHidden = 129;
constexpr int64_t kTeacherHidden = 203;  // rows of 16-bit elements begin anywhere

// Where a tensor of a chunk lies.
enum class Place { kPieces, kStaged, kSystemRegion, kDeviceRegion };

std::vector<double> Wide(const std::vector<float>& values) { return {values.begin(), values.end()}; }

class CudaTeaching : public ::testing::TestWithParam<DataType> {
 protected:
  void Start(int64_t pinned_bytes, absl::Duration window, ChunkLimits limits = {}) {
    problem_ =
        RandomProblem({.shape = {kTokens, kVocab, kHidden}, .type = GetParam(), .logit_deviation = 3.0});
    problem_.teacher = RandomTeacher(
        problem_.shape, {.hidden = kTeacherHidden,
                         .type = GetParam(),
                         .distillation = {.temperature = 2.0f, .weight = 0.5f, .label_weight = 0.25f}});
    for (size_t i = 0; i < kTokens; i += 7) problem_.labels[i] = -100;
    EngineOptions options;
    options.batching_window = window;
    options.chunk_limits = limits;
    cuda_ = nullptr;
    cuda_ = CudaEngine::Create(problem_, options, pinned_bytes);
    if (cuda_ == nullptr) return;
    const absl::StatusOr<std::shared_ptr<Head>> teacher =
        cuda_->engine->CreateHead({.name = "t",
                                   .vocab_size = kVocab,
                                   .hidden_size = kTeacherHidden,
                                   .weight_type = GetParam(),
                                   .weight_gradients = WeightGradients::kFrozen});
    ASSERT_TRUE(teacher.ok()) << teacher.status();
    const std::string write = *(*teacher)->BeginWrite("w", Head::Replace::kNo, "teacher's");
    const std::vector<unsigned char>& weight = problem_.teacher->weight;
    const std::string rows(reinterpret_cast<const char*>(weight.data()), weight.size());
    ASSERT_TRUE((*(*teacher)->FindWrite(write))->Write(0, kVocab, GetParam(), rows).ok());
    (*teacher)->CommitWrite(write, [](const auto& version) { EXPECT_TRUE(version.ok()); });
    cuda_->engine->WaitIdle();
  }

  // In two pieces that part an element, staged by the engine or not, or in a region.
  Payload Put(const std::vector<unsigned char>& states, int64_t first, int64_t tokens, int64_t row_bytes,
              Place place) {
    const ByteSpan rows(reinterpret_cast<const std::byte*>(states.data() + first * row_bytes),
                        static_cast<size_t>(tokens * row_bytes));
    if (place == Place::kPieces || place == Place::kStaged) {
      const size_t cut = rows.size() / 2 + 1;
      Payload payload({rows.first(cut), rows.subspan(cut)}, nullptr, tokens * row_bytes);
      return place == Place::kPieces ? payload : cuda_->engine->Staged(std::move(payload));
    }
    const RegionKind kind = place == Place::kDeviceRegion ? RegionKind::kDevice : RegionKind::kSystem;
    const std::shared_ptr<RegionMemory> memory = *cuda_->device->CreateRegionMemory(
        kind, cuda_->device->RegionBytes(kind, static_cast<int64_t>(rows.size())));
    EXPECT_EQ(cudaMemcpy(memory->data(), rows.data(), rows.size(), cudaMemcpyDefault), cudaSuccess);
    return Payload::In({memory->data(), rows.size()}, memory->place(), memory);
  }

  Chunk Cut(uint64_t sequence, int64_t first, int64_t tokens, Place own, Place teachers) {
    Chunk chunk = cuda_->Cut(sequence, first, tokens);
    chunk.hidden_states = Put(problem_.hidden_states, first, tokens, kHidden * SizeOf(GetParam()), own);
    chunk.teacher_hidden =
        Put(problem_.teacher->hidden_states, first, tokens, kTeacherHidden * SizeOf(GetParam()), teachers);
    chunk.options.distillation =
        ChunkDistillation{.teacher = "t", .hidden_type = GetParam(), .loss = problem_.teacher->distillation};
    chunk.options.returns.divergence = true;
    return chunk;
  }

  double Tolerance() const {
    return GetParam() == DataType::kFloat32 ? 1e-5 : GetParam() == DataType::kBFloat16 ? 4e-3 : 1e-3;
  }

  Problem problem_;
  std::unique_ptr<CudaEngine> cuda_;
};

INSTANTIATE_TEST_SUITE_P(Types, CudaTeaching,
                         ::testing::Values(DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& test) { return std::string(kernels::Name(test.param)); });

TEST_P(CudaTeaching, WhereHiddenStatesLieAndHowTheyAreGatheredChangesNothing) {
  Start(0, absl::ZeroDuration());
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  Stream stream = cuda_->Open("whole");
  cuda_->Submit(stream, Cut(1, 0, kTokens, Place::kPieces, Place::kPieces));
  const ChunkAnswer whole = stream.listener->AwaitAnswers(1)[0];
  ASSERT_TRUE(whole.error.ok()) << whole.error;
  const std::vector<float> dw = cuda_->TakeGradient();
  const kernels::testing::Reference reference = CpuResultsInFloat32(problem_);
  EXPECT_LT(RelativeError(LossesOf(whole), reference.losses), 1e-4);
  EXPECT_LT(RelativeError(dw, reference.dw), 2 * Tolerance());
  EXPECT_EQ(whole.teacher_weight_version, 1U);

  // Sizes on both sides of what is staged; places that differ within a chunk and from chunk to chunk.
  struct Part {
    int64_t tokens;
    Place own;
    Place teachers;
  };
  constexpr Part kParts[] = {{300, Place::kStaged, Place::kStaged},
                             {7, Place::kPieces, Place::kDeviceRegion},
                             {300, Place::kDeviceRegion, Place::kPieces},
                             {93, Place::kSystemRegion, Place::kSystemRegion},
                             {300, Place::kDeviceRegion, Place::kDeviceRegion},
                             {300, Place::kPieces, Place::kStaged}};
  Start(int64_t{64} << 20, absl::Hours(1));  // one batch, begun by the flush
  stream = cuda_->Open("parts");
  int64_t first = 0;
  uint64_t sequence = 0;
  for (const Part& part : kParts) {
    cuda_->Submit(stream, Cut(++sequence, first, part.tokens, part.own, part.teachers));
    first += part.tokens;
  }
  ASSERT_EQ(first, kTokens);
  EXPECT_LT(RelativeError(cuda_->TakeGradient(), Wide(dw)), 1e-5) << "sums in another order";
  for (const ChunkAnswer& answer : stream.listener->AwaitAnswers(sequence)) {
    SCOPED_TRACE("from token " + std::to_string(answer.first_token));
    ASSERT_TRUE(answer.error.ok()) << answer.error;
    const auto slice = [&answer](const std::vector<float>& values, int64_t width) {
      const auto begin = values.begin() + answer.first_token * width;
      return std::vector<float>(begin, begin + answer.tokens * width);
    };
    EXPECT_TRUE(SameBits(LossesOf(answer), slice(LossesOf(whole), 1)));
    EXPECT_TRUE(SameBits(InputGradientsOf(answer), slice(InputGradientsOf(whole), kHidden)));
    EXPECT_EQ(answer.returns.divergences,
              whole.returns.divergences.substr(static_cast<size_t>(answer.first_token) * 4,
                                               static_cast<size_t>(answer.tokens) * 4));
  }
  EXPECT_EQ(cuda_->engine->counters().batch_chunks.sum(), static_cast<double>(sequence));
}

// Needs no GPU. What is aligned twice must not ask for more than the slots have.
TEST(SlotLayout, BothHiddenStatesTogetherFitTheRoomOfTheHeadsOwn) {
  constexpr int64_t kRoom = 1 << 20;
  const int64_t most = SlotLayout::Of(1000, kRoom, SlotLayout::kAlignment, 0, SlotExtras::Most()).in_bytes;
  for (const int64_t own : {int64_t{1}, int64_t{255}, int64_t{256}, int64_t{257}, kRoom / 2 + 1, kRoom - 1}) {
    const SlotLayout both = SlotLayout::Of(1000, own, kRoom - own, 0, SlotExtras::Most());
    EXPECT_LE(both.in_bytes, most) << own;
    EXPECT_GE(both.teacher_hidden, own);
    EXPECT_GE(both.batch_rows, both.teacher_hidden + kRoom - own);
    EXPECT_EQ(both.teacher_hidden % SlotLayout::kAlignment, 0);
  }
  const SlotLayout alone = SlotLayout::Of(1000, kRoom, 0, 0, SlotExtras::Most());
  EXPECT_EQ(alone.batch_rows, kRoom) << "without a teacher nothing is taken";
}

TEST_P(CudaTeaching, TheLargestChunkWithEveryReturnFitsItsSlot) {
  const int64_t row_bytes = (kHidden + kTeacherHidden) * SizeOf(GetParam());
  Start(0, absl::ZeroDuration(), {.max_chunk_bytes = kTokens * row_bytes, .max_chunk_tokens = kTokens});
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const Stream stream = cuda_->Open("largest");
  Chunk chunk = Cut(1, 0, kTokens, Place::kPieces, Place::kPieces);
  chunk.options.loss.lse_square_scale = 1e-4f;
  chunk.options.returns = {.log_sum_exp = true,
                           .z_loss = true,
                           .log_probability = true,
                           .entropy = true,
                           .prediction = true,
                           .target_rank = true,
                           .divergence = true,
                           .top_k = kernels::kMostTopK};
  cuda_->Submit(stream, std::move(chunk));
  const ChunkAnswer answer = stream.listener->AwaitAnswers(1)[0];
  EXPECT_EQ(answer.disposition, Disposition::kAccumulated) << answer.error;
}

TEST_P(CudaTeaching, ATeacherThatIsDeletedWhileItsBatchIsUnderWayIsThereUntilItsEnd) {
  Start(0, absl::ZeroDuration());
  if (cuda_ == nullptr) GTEST_SKIP() << "there is no GPU";
  const Stream stream = cuda_->Open("client");
  cuda_->Submit(stream, Cut(1, 0, kTokens, Place::kPieces, Place::kPieces));
  const ChunkAnswer before = stream.listener->AwaitAnswers(1)[0];
  cuda_->Submit(stream, Cut(2, 0, kTokens, Place::kPieces, Place::kPieces));
  std::promise<void> released;
  ASSERT_TRUE(
      cuda_->engine->DeleteHead("t", Engine::DiscardGradient::kNo, [&] { released.set_value(); }).ok());
  lossd::testing::Await("the head to be released", released);
  const ChunkAnswer after = stream.listener->AwaitAnswers(2)[1];
  if (after.disposition == Disposition::kRejected) return;  // it was not started before
  EXPECT_EQ(after.losses, before.losses);
}

}  // namespace
}  // namespace lossd::engine::cuda_teaching_test
