// Soft targets in deterministic sessions on the CPU: the same bits of dW however the tokens are sent, of the
// teachers' weights that the tokens were answered with, and memory for the teachers' rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <future>
#include <random>
#include <thread>
#include <utility>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/head/deterministic_fixture.h"

namespace lossd::engine::deterministic_teaching_test {
namespace {

using lossd::testing::Await;
using ::testing::HasSubstr;

constexpr int64_t kNarrow = 5;  // hidden sizes of the teachers
constexpr int64_t kWide = 24;

class DeterministicTeachingTest : public DeterministicTest {
 protected:
  DeterministicTeachingTest() { CreateWithTeachers(); }

  void CreateWithTeachers(int64_t limit_bytes = int64_t{1} << 30) {
    Create({}, limit_bytes);
    CreateTeacher("narrow", kNarrow);
    CreateTeacher("wide", kWide);
  }
  void CreateTeacher(const std::string& name, int64_t hidden) {
    ASSERT_TRUE(engine_
                    ->CreateHead({.name = name,
                                  .vocab_size = kVocab,
                                  .hidden_size = hidden,
                                  .weight_type = kernels::DataType::kFloat32})
                    .ok());
    WriteTo(name, 1);
  }
  void WriteTo(const std::string& name, float scale) {
    const std::shared_ptr<Head> head = *engine_->FindHead(name);
    const int64_t values = kVocab * head->config().hidden_size;
    std::vector<float> rows(static_cast<size_t>(values));
    for (int64_t i = 0; i < values; ++i) {
      rows[static_cast<size_t>(i)] = scale * static_cast<float>((i * 17) % 89) / 89;
    }
    const std::string write = *head->BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
    ASSERT_TRUE((*head->FindWrite(write))
                    ->Write(0, kVocab, kernels::DataType::kFloat32,
                            {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(float)})
                    .ok());
    std::promise<void> published;
    head->CommitWrite(write, [&](const absl::StatusOr<uint64_t>&) { published.set_value(); });
    Await("weights to be published", published);
  }
  // Tokens of a window, taught by one of these, or by none: "".
  static Chunk Taught(uint64_t sequence, int64_t place, int64_t tokens, const std::string& teacher,
                      uint64_t generation = 1) {
    Chunk chunk = MakeChunk(sequence, place, tokens, generation);
    if (teacher.empty()) return chunk;
    chunk.options.distillation = ChunkDistillation{
        .teacher = teacher, .loss = {.temperature = 2, .weight = 0.5f, .label_weight = 0.25f}};
    const int64_t width = teacher == "narrow" ? kNarrow : teacher == "wide" ? kWide : kHidden;
    std::vector<float> rows;
    for (int64_t token = place; token < place + tokens; ++token) {
      for (int64_t h = 0; h < width; ++h) rows.push_back(std::cos(static_cast<float>(token * 23 + h * h)));
    }
    chunk.teacher_hidden =
        Payload::Of(std::string(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(float)));
    return chunk;
  }
  // In one tile there are tokens of both teachers, and tokens without.
  static std::string TeacherAt(int64_t place) {
    return place < 20 ? "" : place < 43 ? "narrow" : place < 73 ? "wide" : place < 120 ? "narrow" : "";
  }
  static int64_t EndOfTeaching(int64_t place) {
    for (const int64_t end : {20, 43, 73, 100, 120}) {
      if (place < end) return end;
    }
    return kTokens;
  }
  std::string OpenPlain() { return engine_->OpenSession("h", {"plain", 9, 1})->info.session_id; }
  std::vector<float> Settled() {
    engine_->WaitIdle();
    return Flush();
  }
  // As a session adds them that computes dW with the chunk: pieces [0, 10), [10, 16) and [16, 20), the first
  // before what `between` does.
  template <typename Between>
  std::vector<float> AddedAtOnce(const Between& between) {
    const LaneAttachment lane = Attach(OpenPlain());
    Submit(lane, Taught(1, 0, 10, "wide"));
    engine_->WaitIdle();
    between();
    Submit(lane, Taught(2, 10, 6, "wide"));
    Submit(lane, Taught(3, 16, 4, "wide"));
    return Settled();
  }
  // Rows of `others` and of a teacher in one tile, which is not full when that teacher changes; then the
  // rest, in chunks that end there.
  template <typename Change>
  std::vector<float> MixedTile(const LaneAttachment& lane, const std::string& others, const Change& change,
                               const std::vector<int64_t>& ends) {
    Submit(lane, Taught(1, 0, 10, others));
    Submit(lane, Taught(2, 10, 5, "wide"));
    engine_->WaitIdle();
    change();
    uint64_t sequence = 3;
    int64_t place = 15;
    for (const int64_t end : ends) {
      Submit(lane, Taught(sequence++, place, end - place, "wide"));
      place = end;
    }
    return Settled();
  }
};

TEST_F(DeterministicTeachingTest, TheGradientHasTheSameBitsHoweverTheTokensAreSent) {
  const LaneAttachment first = Attach(Open("c", 0));
  uint64_t sequence = 1;
  for (int64_t place = 0; place < kTokens;) {
    const int64_t end = std::min(place + kMostTokens, EndOfTeaching(place));
    Submit(first, Taught(sequence++, place, end - place, TeacherAt(place)));
    place = end;
  }
  const std::vector<float> expected = Settled();
  for (uint64_t seed = 1; seed <= 15; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t limit) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
    };
    const auto lanes = static_cast<int32_t>(below(3) + 1);
    const std::string session = Open("c" + std::to_string(seed), static_cast<int32_t>(seed), lanes);
    std::vector<LaneAttachment> attached;
    for (int32_t lane = 0; lane < lanes; ++lane) attached.push_back(Attach(session, lane));
    std::vector<std::pair<int64_t, int64_t>> cuts;
    for (int64_t place = 0; place < kTokens;) {
      const int64_t end = std::min(place + below(kMostTokens) + 1, EndOfTeaching(place));
      cuts.emplace_back(place, end);
      place = end;
    }
    if (below(2) == 0) std::shuffle(cuts.begin(), cuts.end(), random);
    std::vector<uint64_t> sent(attached.size(), 0);
    for (const auto& [place, end] : cuts) {
      const auto lane = static_cast<size_t>(below(lanes));
      Submit(attached[lane],
             Taught(++sent[lane], place, end - place, TeacherAt(place), head_->Info().generation));
    }
    engine_->WaitIdle();
    ASSERT_EQ(engine_->counters().chunks_rejected, 0U);
    ASSERT_TRUE(SameBits(Flush(), expected));
    ASSERT_TRUE(engine_->CloseSession(session).ok());
  }
}

TEST_F(DeterministicTeachingTest, TheGradientIsThatOfOtherSessionsButForTheOrderOfSums) {
  std::vector<std::vector<float>> gradients;
  for (const bool deterministic : {true, false}) {
    const LaneAttachment lane = Attach(deterministic ? Open("c", 0) : OpenPlain());
    uint64_t sequence = 1;
    for (int64_t place = 0; place < kTokens;) {
      const int64_t end = std::min(place + 7, EndOfTeaching(place));
      Submit(lane, Taught(sequence++, place, end - place, TeacherAt(place), head_->Info().generation));
      place = end;
    }
    gradients.push_back(Settled());
  }
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < gradients[0].size(); ++i) {
    difference += std::pow(gradients[0][i] - gradients[1][i], 2);
    size += std::pow(gradients[1][i], 2);
  }
  EXPECT_GT(size, 0);
  EXPECT_LT(std::sqrt(difference / size), 1e-6);
}

TEST_F(DeterministicTeachingTest, RowsAreAddedWithTheTeachersWeightsTheyWereAnsweredWith) {
  const std::vector<std::pair<std::string, std::function<void()>>> changes = {
      {"a write", [this] { WriteTo("wide", 5); }},
      {"a blend",
       [this] {
         CreateTeacher("source", kWide);
         WriteTo("source", 3);
         std::promise<absl::StatusOr<uint64_t>> blended;
         (*engine_->FindHead("wide"))
             ->Blend(*engine_->FindHead("source"), {.decay = 0.5, .blend_id = "b"},
                     [&](absl::StatusOr<uint64_t> version) { blended.set_value(std::move(version)); });
         EXPECT_TRUE(Await("the blend", blended).ok());
       }},
      {"a deletion",
       [this] {
         std::promise<void> released;
         EXPECT_TRUE(
             engine_->DeleteHead("wide", Engine::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
         Await("the head to be released", released);
         CreateTeacher("wide", kWide);
         WriteTo("wide", 7);
       }},
  };
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    CreateWithTeachers();
    const std::vector<float> expected = AddedAtOnce(change);
    CreateWithTeachers();
    EXPECT_FALSE(SameBits(AddedAtOnce([] {}), expected)) << "the change tells";
    CreateWithTeachers();
    const LaneAttachment lane = Attach(Open("c", 0));
    Submit(lane, Taught(1, 0, 10, "wide"));
    engine_->WaitIdle();
    change();
    Submit(lane, Taught(2, 10, 10, "wide"));
    EXPECT_TRUE(SameBits(Settled(), expected));
    for (const std::string& others : {std::string(), std::string("narrow")}) {
      SCOPED_TRACE("in a tile with rows of " + (others.empty() ? "no teacher" : others));
      CreateWithTeachers();
      const std::vector<float> mixed = MixedTile(Attach(OpenPlain()), others, change, {16, 20});
      CreateWithTeachers();
      EXPECT_TRUE(SameBits(MixedTile(Attach(Open("c", 0)), others, change, {20}), mixed));
    }
  }
}

TEST_F(DeterministicTeachingTest, AHeadThatTeachesItselfIsAddedWithTheWeightsItWasAnsweredWith) {
  const auto run = [this](const LaneAttachment& lane, const std::vector<int64_t>& cuts) {
    uint64_t sequence = 1;
    Submit(lane, Taught(sequence++, 0, 10, "h"));
    engine_->WaitIdle();
    Write(5);
    int64_t place = 10;
    for (const int64_t end : cuts) {
      Submit(lane, Taught(sequence++, place, end - place, "h"));
      place = end;
    }
    return Settled();
  };
  const std::vector<float> expected = run(Attach(OpenPlain()), {16, 20});
  Create({});
  EXPECT_TRUE(SameBits(run(Attach(Open("c", 0)), {13, 20}), expected));
}

// Nothing of a tile is left that would need the teacher, whatever the order of what happens to both.
TEST_F(DeterministicTeachingTest, ADeletedTeacherGivesItsMemoryBackWhileTheWindowIsOpen) {
  const LaneAttachment lane = Attach(Open("c", 0));
  Submit(lane, Taught(1, 0, 10, "wide"));
  engine_->WaitIdle();
  const int64_t before = engine_->budget().reserved();
  std::promise<void> released;
  ASSERT_TRUE(engine_->DeleteHead("wide", Engine::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  Await("the head to be released", released);
  EXPECT_LE(engine_->budget().reserved(), before - kVocab * kWide * 4);
  const ChunkAnswer answer = AnswerOf(lane, Taught(2, 10, 10, "wide"));
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kNotFound);
  Submit(lane, Taught(3, 10, 10, "narrow"));
  const std::vector<float> gradient = Settled();
  EXPECT_GT(*std::max_element(gradient.begin(), gradient.end()), 0);
}

TEST_F(DeterministicTeachingTest, OneHeadsTeacherLeavesTheTilesOfOthersAlone) {
  const auto run = [this](const std::string& written) {
    CreateWithTeachers();
    const LaneAttachment lane = Attach(Open("c", 0));
    Submit(lane, Taught(1, 0, 10, "wide"));
    engine_->WaitIdle();
    if (!written.empty()) WriteTo(written, 5);
    Submit(lane, Taught(2, 10, 6, "wide"));
    return Settled();
  };
  const std::vector<float> undisturbed = run("");
  EXPECT_TRUE(SameBits(run("narrow"), undisturbed));
  EXPECT_FALSE(SameBits(run("wide"), undisturbed));
}

TEST_F(DeterministicTeachingTest, MemoryForATeachersRowsIsReservedWhenTheFirstComeAndRefusedWithATable) {
  const std::string session = Open("c", 0);
  const LaneAttachment lane = Attach(session);
  const auto reserved = [this] { return engine_->budget().reserved(); };
  const int64_t none = reserved();
  EXPECT_TRUE(AnswerOf(lane, Taught(1, 0, 1, "")).error.ok());
  EXPECT_TRUE(AnswerOf(lane, Taught(2, 1, 1, "narrow")).error.ok());
  EXPECT_EQ(reserved(), none + kMostTokens * kNarrow * 4);
  EXPECT_EQ(FieldOf(AnswerOf(lane, Taught(3, 1, 1, "wide")).error), "window_token");
  EXPECT_EQ(reserved(), none + kMostTokens * kNarrow * 4) << "none for a chunk without a place";
  EXPECT_TRUE(AnswerOf(lane, Taught(4, 2, 1, "wide")).error.ok());
  EXPECT_TRUE(AnswerOf(lane, Taught(5, 3, 1, "narrow")).error.ok());
  const int64_t all = none + kMostTokens * kWide * 4;
  EXPECT_EQ(reserved(), all) << "room for the widest";
  EXPECT_EQ(TotalBytes(head_->Info().memory) + TotalBytes((*engine_->FindHead("wide"))->Info().memory) +
                TotalBytes((*engine_->FindHead("narrow"))->Info().memory) + (1 << 20),
            all);
  Settled();
  ASSERT_TRUE(engine_->CloseSession(session).ok());
  engine_->WaitIdle();
  const int64_t closed = reserved();
  Open("c", 0);
  EXPECT_EQ(reserved() - closed, none - closed) << "nothing of it is left";

  CreateWithTeachers(all - 1);
  const LaneAttachment cramped = Attach(Open("c", 0));
  Chunk wide = Taught(1, 0, 4, "wide");
  ChunkAnswer answer = AnswerOf(cramped, wide);
  EXPECT_EQ(answer.error.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(FieldOf(answer.error), "teacher_hidden_states");
  EXPECT_THAT(answer.error.message(), HasSubstr("soft targets in a deterministic session of head h"));
  EXPECT_THAT(answer.error.message(), HasSubstr("tiles"));
  EXPECT_TRUE(AnswerOf(cramped, Taught(2, 0, 4, "narrow")).error.ok()) << "its place is free";
  EXPECT_EQ(AnswerOf(cramped, std::move(wide)).disposition, Disposition::kRejected) << "it stays rejected";
  Settled();
}

TEST_F(DeterministicTeachingTest, AClientMayOverwriteTheTeachersRowsOnceItHasTheAnswer) {
  const LaneAttachment lane = Attach(Open("c", 0));
  Submit(lane, Taught(1, 0, 10, "wide"));
  const std::vector<float> expected = Settled();
  Chunk chunk = Taught(2, 0, 10, "wide", 2);
  std::vector<float> rows(10 * kWide);
  Gather(chunk.teacher_hidden.parts(), reinterpret_cast<std::byte*>(rows.data()));
  // As in a region: the payload keeps nothing.
  chunk.teacher_hidden = Payload({std::as_bytes(std::span(rows))}, nullptr, /*kept_bytes=*/0);
  EXPECT_TRUE(AnswerOf(lane, std::move(chunk)).error.ok());
  std::fill(rows.begin(), rows.end(), 1e30f);
  EXPECT_TRUE(SameBits(Settled(), expected));
}

// Heads that teach each other in tiles, each written to, stepped past and deleted while the other's chunks
// come: everything comes to an end. Also for ThreadSanitizer.
TEST_F(DeterministicTeachingTest, HeadsTeachEachOtherWhileTheyAreWrittenAndDeleted) {
  std::atomic<bool> over = false;
  std::thread owner([&] {
    for (float scale = 1; !over; scale += 0.25f) {
      CreateTeacher("pupil", kHidden);
      const std::shared_ptr<Head> pupil = *engine_->FindHead("pupil");
      const absl::StatusOr<OpenedSession> opened =
          engine_->OpenSession("pupil", {"other", 0, 1, Deterministic::kYes});
      EXPECT_TRUE(opened.ok()) << opened.status();
      const auto listener = std::make_shared<RecordingListener>();
      const LaneAttachment lane = *pupil->AttachLane(opened->info.session_id, 0, listener);
      for (uint64_t sequence = 1; sequence <= 5; ++sequence) {
        Chunk chunk = Taught(sequence, static_cast<int64_t>(sequence) * 5, 5, "h");
        EXPECT_TRUE(pupil->Submit(lane, chunk, [] {}).ok());
      }
      WriteTo("pupil", scale);
      EXPECT_TRUE(engine_->DeleteHead("pupil", Engine::DiscardGradient::kYes).ok());
    }
  });
  const LaneAttachment lane = Attach(Open("c", 0));
  const std::shared_ptr<RecordingListener> listener = listeners_.back();
  constexpr uint64_t kChunks = 120;
  for (uint64_t sequence = 1; sequence <= kChunks; ++sequence) {
    const auto place = static_cast<int64_t>(sequence) * 5;
    Chunk chunk = Taught(sequence, place, 5, sequence % 2 == 0 ? "pupil" : "wide");
    Submit(lane, std::move(chunk));
    if (sequence % 40 == 0) Write(static_cast<float>(sequence) / 100);
    if (sequence % 30 == 0) WriteTo("wide", static_cast<float>(sequence) / 100);
  }
  listener->AwaitAnswers(kChunks);
  over = true;
  owner.join();
  Settled();
}

}  // namespace
}  // namespace lossd::engine::deterministic_teaching_test
