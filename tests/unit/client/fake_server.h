// A server of one small head, over real gRPC on loopback, for what the real server cannot be made to show: it
// keeps the protocol's books as that does, and breaks off, loses, corrupts or forgets at an exact point. It
// also sends rows two at a time, where the real one sends megabytes. Everything else about the client is
// tested against the real one (tests/integration/client).
//
// "Gradient": dW[label] += gradient_scale * x; "loss": label + x[0], times the token's weight; "dX": 2 x.
// Whole numbers stay exact, so that sums can be compared whatever their order. What is returned of each
// token: the log-sum-exp is its upstream gradient, the k-th best token label + k, a divergence half of its
// label, each of its other values its label.
#ifndef LOSSD_TESTS_UNIT_CLIENT_FAKE_SERVER_H_
#define LOSSD_TESTS_UNIT_CLIENT_FAKE_SERVER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "grpcpp/server.h"
#include "lossd/v1/gradient.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/status.grpc.pb.h"
#include "proto/wire/features.h"
#include "tests/unit/client/session_data.h"

namespace lossd::testing {

// What happens to one chunk.
enum class Fate {
  kTake,
  kCutBeforeTaking,     // the stream breaks; the chunk was never accepted
  kCutBeforeAnswer,     // accepted and added, but the answer is lost
  kCutAfterAnswer,      // the stream breaks right behind the answer
  kEndBeforeTaking,     // the server ends the call with OK
  kRestartKeepHead,     // the server is another one, which was given the same head
  kRestartLoseHead,     // the server is another one and has no head
  kAbortBefore,         // somebody aborts the flush that is under way just before
  kRestoreBefore,       // somebody restores the head, which is at generation 1 and as many chunks then
  kReplicaLost,         // with what it had accepted, as `loss` says
  kWrongSize,           // answered with half of dX
  kTakenBySomeoneElse,  // another process sent this sequence first
  kOvertaken,           // the stream breaks, and then another process sends a hundred chunks more
  kStall                // nothing more is read from this stream until `stalled_until`
};

// What happens to one message of a stream of rows.
enum class RowFate { kSend, kCut, kCorrupt, kWrongRow };

class FakeServer {
 public:
  static constexpr int64_t kVocab = testing::kVocab;
  static constexpr int64_t kHidden = testing::kHidden;
  static constexpr const char* kName = kHeadName;

  FakeServer();
  ~FakeServer();

  std::string target() const;
  // As another process that is killed: its connections break, and no new ones are taken.
  void Stop();

  // One of a set of replicas, whose windows have this history. Other replicas' sessions that are opened here
  // are at `sessions_at`, whose calls about them are passed on; null: they are here.
  void BecomeReplica(uint64_t history, const std::string& incarnation);
  FakeServer* sessions_at = nullptr;
  // The replica is lost, started anew and filled: its sessions are gone, and this is what the set is at.
  struct Loss {
    std::string incarnation;
    uint64_t generation = 1;
    uint64_t history = 0;   // 0: as before
    uint64_t restores = 0;  // more than before
  };
  void Lose(const Loss& is);
  Loss loss;                                // of Fate::kReplicaLost
  std::optional<Loss> loss_before_streams;  // before the next stream of a session
  std::optional<bool> in_window;            // as OpenSession tells it; unset: whether anything is accepted

  struct Observed {
    std::vector<int> stream_lanes;  // of each stream, in the order of their starts
    std::vector<int> chunk_lanes;   // of each of `chunks`
    int64_t peak_outstanding_bytes = 0;
    int streams = 0;
    int sessions = 0;
    int commits = 0;  // calls of CommitFlush
    int aborts = 0;
    int refused_deletions = 0;
    std::vector<int64_t> gradient_first_rows;
    int weight_write_streams = 0;
    std::vector<v1::BeginWriteRequest> begun_writes;
    std::vector<v1::WriteWeightsRequest> weight_writes;  // without their rows
    std::vector<v1::ReadWeightsRequest> weight_reads;
    int64_t largest_weight_bytes = 0;  // of a message of rows
    std::vector<v1::Chunk> chunks;     // as they arrived, payload and all
    std::vector<v1::BeginFlushRequest> flushes;
    std::vector<v1::CreateHeadRequest> creations;
    std::vector<v1::ApplyStepRequest> steps;  // calls, repeated ones too
    std::vector<v1::GradientStatsRequest> stats;
    std::vector<int64_t> logits_rows;  // of each call
    std::vector<v1::OpenSessionRequest> openings;
    std::vector<v1::SaveCheckpointRequest> saves;
    int closed_sessions = 0;
  };

  // Scripts; set before the calls they are about. Counted calls: from 0.
  std::function<Fate(uint64_t sequence, int attempt)> on_chunk;
  std::function<Fate(int lane, uint64_t sequence, int attempt)> on_lane_chunk;  // instead of on_chunk
  std::function<RowFate(int message)> on_gradient_rows;  // counted over the whole life of the server
  std::function<RowFate(int message)> on_weight_rows;
  std::function<bool(int message)> cut_weight_write;
  int forgotten_writes = 0;  // CommitWrite, or rows, meet a server that knows no such write, that many times
  bool rows_forgotten = false;           // rows do, not CommitWrite
  bool forgotten_are_published = false;  // and somebody has published a version meanwhile
  bool others_write = false;             // BeginWrite finds a write of somebody else's
  int lost_commits = 0;                  // CommitFlush is done, but its answer is lost, that many times
  int lost_steps = 0;                    // ApplyStep likewise
  int unreached_commits = 0;             // CommitFlush is not done, and not answered, that many times
  grpc::StatusCode unreached_commit_code = grpc::StatusCode::UNAVAILABLE;  // what gRPC makes of that
  int busy_deletions = 0;  // DeleteHead is RESOURCE_EXHAUSTED with this delay, that many times
  std::chrono::milliseconds busy_delay{1};
  int lost_deletions = 0;  // DeleteHead is done, but its answer is lost, that many times
  int slow_steps = 0;      // ApplyStep is done, but the caller's time is up before that, that many times
  bool marks_of_another_past = false;  // ApplyStep finds that the marks are
  bool restart_before_steps = false;   // the next ApplyStep meets another server, which has the same head
  // Calls for logits, of two rows at most, whose logits are all 1. The call numbered so, from 1, meets
  // another server, or weights that were restored, whose logits are all 2: of the same version.
  int restart_before_logits = 0;
  int restore_before_logits = 0;
  int refused_aborts = 0;                           // AbortFlush fails that many times
  std::vector<std::string> lane_addresses;          // as OpenSession tells them
  int unavailable_status = 0;                       // GetStatus fails that many times
  wire::Features features = wire::KnownFeatures();  // as GetStatus lists them, of lossd 0.0.7
  bool change_weights_on_cut = false;
  bool has_bias = false;
  bool corrupt_bias_gradient = false;
  bool double_buffer = false;  // the head has two gradients
  bool short_returns = false;  // answers leave the last of each array out
  static constexpr int64_t kRowsPerMessage = 2;
  // When a stalled stream goes on; looked at whenever a chunk has been dealt with.
  std::function<bool(const Observed&)> stalled_until;
  // Answers are held back until the client has used its credit up or has sent this many chunks.
  int hold_answers_until_chunks = 0;
  v1::SessionLimits limits;

  // What happened.
  Observed observed() const;
  std::vector<float> window() const;  // dW
  uint64_t generation() const;
  v1::WindowState window_state() const;
  std::vector<float> weights() const;
  std::vector<float> bias() const;
  void set_weights(std::vector<float> weights);

 private:
  class HeadService;
  class LossService;
  class GradientService;
  class StatusService;

  struct Session {
    std::string id;
    std::vector<uint64_t> accepted;  // by lane
  };
  struct Stream {
    std::string client_key;
    int lane = 0;
    int64_t outstanding_bytes = 0;
    std::vector<v1::ComputeResponse> held;
    std::vector<int64_t> held_bytes;
  };
  using Writer = grpc::ServerReaderWriter<v1::ComputeResponse, v1::ComputeRequest>;

  grpc::Status Open(const v1::OpenSessionRequest& request, v1::OpenSessionResponse* response);
  grpc::Status Attach(const v1::ComputeStart& start, Stream* stream, v1::ComputeReady* ready);
  // Returns false when the stream is to end with *status.
  bool TakeChunk(const v1::Chunk& chunk, Stream* stream, Writer* writer, grpc::Status* status);
  bool DealWith(const v1::Chunk& chunk, Fate fate, std::unique_lock<std::mutex>* lock, Stream* stream,
                Writer* writer, grpc::Status* status);
  bool Admit(const v1::Chunk& chunk, const Stream& stream, std::unique_lock<std::mutex>* lock,
             v1::Disposition* disposition, grpc::Status* status);
  v1::ComputeResponse Answer(const v1::Chunk& chunk, v1::Disposition disposition) const;
  void FillReturns(const v1::Chunk& chunk, v1::ChunkResult* result) const;
  void AddToWindow(const v1::Chunk& chunk);
  // The bias's gradient: half of each row's first element.
  std::vector<float> BiasWindow() const;
  void Restart(bool keep_head);
  void LoseLocked(const Loss& is);
  void CommitWindow();
  void ReopenWindow();
  Session* FindSession(const std::string& client_key);
  uint64_t& AcceptedOf(const Stream& stream) {
    return FindSession(stream.client_key)->accepted.at(static_cast<size_t>(stream.lane));
  }
  bool ForgetsWrite();
  grpc::Status PositionError(grpc::StatusCode code, const std::string& message,
                             std::optional<uint64_t> restores = std::nullopt) const;
  void FillHead(v1::Head* head) const;

  mutable std::mutex mutex_;
  std::condition_variable committed_;
  std::condition_variable chunk_done_;
  std::string incarnation_ = "incarnation-1";
  uint64_t history_ = 0;
  uint64_t restores_ = 0;
  bool has_head_ = true;
  bool shut_down_ = false;
  uint64_t generation_ = 1;
  bool frozen_ = false;
  std::string last_committed_;
  v1::ApplyStepRequest last_step_;
  v1::ApplyStepResponse last_step_answer_;
  std::vector<float> window_;
  std::vector<float> next_window_;  // while frozen, of a head with two gradients
  std::vector<float> weights_;
  std::vector<float> bias_;
  uint64_t weight_version_ = 1;
  std::map<std::string, Session> sessions_;                         // by client_key
  std::map<std::tuple<std::string, int, uint64_t>, int> attempts_;  // by client_key, lane and sequence
  int gradient_messages_ = 0;
  int weight_messages_ = 0;
  int weight_write_messages_ = 0;
  Observed observed_;

  std::unique_ptr<HeadService> head_service_;
  std::unique_ptr<LossService> loss_service_;
  std::unique_ptr<GradientService> gradient_service_;
  std::unique_ptr<StatusService> status_service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_UNIT_CLIENT_FAKE_SERVER_H_
