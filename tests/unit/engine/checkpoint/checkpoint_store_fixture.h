// A store of checkpoints in a temporary folder, whose steps on the disk can fail.
#ifndef LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_STORE_FIXTURE_H_
#define LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_STORE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"

namespace lossd::engine::checkpoint_store_test {

inline constexpr int64_t kVocab = 8;
inline constexpr int64_t kHidden = 4;

inline HeadCheckpoint MakeCheckpoint(uint64_t generation) {
  HeadCheckpoint head;
  head.config.name = "h";
  head.config.vocab_size = kVocab;
  head.config.hidden_size = kHidden;
  head.config.weight_type = kernels::DataType::kFloat32;
  head.config.class_weights = std::make_shared<const std::vector<float>>(kVocab, 0.5f);
  head.incarnation = "i";
  head.weight_version = 3;
  head.window.generation = generation;
  head.window.tokens = 17;
  head.window.last_step.result.stats.norm = std::numeric_limits<double>::infinity();
  head.last_session_number = 4;
  SessionCheckpoint session{"s", {}, DeterministicTiles::Content{4, 0, {}, {}, {}}};
  session.session.number = 4;
  session.session.client_key = "key";
  session.session.rank = -1;
  session.session.lanes.resize(2);
  session.session.lanes[1].accepted = session.session.lanes[1].started = session.session.lanes[1].applied = 9;
  session.session.lanes[1].rejected = {2, 5};
  Chunk chunk;
  chunk.window_token = 1;
  chunk.tokens = 2;
  chunk.gradient_scale = 0.1f;
  chunk.options.Set(&kernels::LossOptions::softcap, 30.0f);
  chunk.labels = std::string(16, '\1');
  chunk.lse_gradients = std::string(8, '\2');
  chunk.entropy_gradients = std::string(8, '\4');
  chunk.hidden_states = Payload::Of(std::string(2 * kHidden * 4, '\3'));
  session.tiles->taken = {{1, 3}};
  session.tiles->filled = {{0, 2}};
  session.tiles->kept.push_back(std::move(chunk));
  head.sessions.push_back(std::move(session));
  head.tensors = {{"weight", kernels::DataType::kFloat32, kVocab, kHidden}};
  head.gradients = {SessionGradient(4)};
  return head;
}

inline std::string Labels(int64_t first, int64_t second) {
  std::string bytes(16, '\0');
  std::memcpy(bytes.data(), &first, sizeof(first));
  std::memcpy(bytes.data() + 8, &second, sizeof(second));
  return bytes;
}

class CheckpointStoreTest : public ::testing::Test {
 protected:
  CheckpointStoreTest() { Open(); }
  void Open() {
    store_ = nullptr;  // it has the folder for itself
    auto store = CheckpointStore::Open(folder_.path(), [this](absl::string_view step, const std::string&) {
      ++steps_;
      if (steps_ == failing_step_) failed_step_ = std::string(step);
      return failing_step_ != 0 && steps_ >= failing_step_ && (fails_for_good_ || steps_ == failing_step_)
                 ? error_
                 : 0;
    });
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    steps_ = 0;
  }
  // The weights are `fill` everywhere.
  absl::StatusOr<CheckpointInfo> Save(const std::string& tag, uint64_t generation, char fill,
                                      const std::string& key = "") {
    absl::StatusOr<std::unique_ptr<CheckpointWriter>> writer = store_->Begin("h", tag);
    if (!writer.ok()) return writer.status();
    const auto add = [&](const std::string& name, size_t bytes, const std::string& with_key) {
      return (*writer)->Add(name, with_key, [&](const CheckpointWriter::Append& append) {
        std::string content(bytes, fill);
        if (name == TilesFile(4)) content.replace(0, labels_.size(), labels_);
        return append(std::as_bytes(std::span(content)));
      });
    };
    absl::Status status = add(TensorFile("weight"), kVocab * kHidden * 4, key);
    if (status.ok()) status = add(SessionGradient(4), kVocab * kHidden * 4, "");
    if (status.ok()) status = add(TilesFile(4), 2 * 8 + 2 * 2 * 4 + 2 * kHidden * 4, "");
    if (!status.ok()) return status;
    absl::StatusOr<CheckpointInfo> info = store_->Commit(**writer, MakeCheckpoint(generation));
    bytes_written_ = (*writer)->bytes_written();
    return info;
  }
  absl::StatusOr<CheckpointReader> Find(const std::string& tag) {
    absl::StatusOr<CheckpointReader> reader = store_->Find("h", tag);
    if (!reader.ok()) return reader.status();
    if (absl::Status verified = reader->Verify(); !verified.ok()) return verified;
    return reader;
  }
  static char FirstByte(const CheckpointReader& reader) {
    std::byte byte{};
    EXPECT_TRUE(reader.Read(TensorFile("weight"), 0, {&byte, 1}).ok());
    return static_cast<char>(byte);
  }

  CheckpointFolder folder_;
  std::unique_ptr<CheckpointStore> store_;
  std::string labels_ = Labels(1, -100);  // of the chunk that a tile holds
  int64_t bytes_written_ = 0;
  int steps_ = 0;
  int failing_step_ = 0;  // 0: none
  bool fails_for_good_ = false;
  int error_ = ENOSPC;
  std::string failed_step_;
};

}  // namespace lossd::engine::checkpoint_store_test

#endif  // LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_STORE_FIXTURE_H_
