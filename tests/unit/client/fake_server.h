// A server of one small head, over real gRPC on loopback, for what the real server cannot be made to be: one
// of replicas that is lost, one of another version, or one that says nothing any more. It keeps the
// protocol's books as that does. Everything else about the client is tested against the real one
// (tests/integration/client).
//
// "Gradient": dW[label] += gradient_scale * x; "loss": label + x[0], times the token's weight; "dX": 2 x.
// Whole numbers stay exact, so that sums can be compared whatever their order.
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
#include "tests/support/session_data.h"

namespace lossd::testing {

// What happens to one chunk.
enum class Fate {
  kTake,
  kCutBeforeTaking,  // the stream breaks; the chunk was never accepted
  kCutBeforeAnswer,  // accepted and added, but the answer is lost
  kCutAfterAnswer,   // the stream breaks right behind the answer
  kReplicaLost,      // with what it had accepted, as `loss` says
  kStall             // nothing more is read from this stream until `stalled_until`
};

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
    int streams = 0;
    int sessions = 0;
    int refused_deletions = 0;
    std::vector<v1::Chunk> chunks;  // as they arrived, payload and all
    std::vector<v1::CreateHeadRequest> creations;
    std::vector<v1::ApplyStepRequest> steps;  // calls, repeated ones too
    std::vector<v1::GradientStatsRequest> stats;
    std::vector<v1::SaveCheckpointRequest> saves;
    int closed_sessions = 0;
  };

  // Scripts; set before the calls they are about.
  std::function<Fate(uint64_t sequence, int attempt)> on_chunk;
  // When a stalled stream goes on; looked at whenever a chunk has been dealt with.
  std::function<bool()> stalled_until;
  int busy_deletions = 0;  // DeleteHead is RESOURCE_EXHAUSTED with this delay, that many times
  std::chrono::milliseconds busy_delay{1};
  int slow_steps = 0;  // ApplyStep is done, but the caller's time is up before that, that many times
  bool marks_of_another_past = false;               // ApplyStep finds that the marks are
  std::vector<std::string> lane_addresses;          // as OpenSession tells them
  wire::Features features = wire::KnownFeatures();  // as GetStatus lists them, of lossd 0.0.7

  // What happened.
  Observed observed() const;
  std::vector<float> window() const;  // dW
  std::vector<float> weights() const;

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
  };
  using Writer = grpc::ServerReaderWriter<v1::ComputeResponse, v1::ComputeRequest>;

  grpc::Status Open(const v1::OpenSessionRequest& request, v1::OpenSessionResponse* response);
  grpc::Status Attach(const v1::ComputeStart& start, Stream* stream, v1::ComputeReady* ready);
  // Returns false when the stream is to end with *status.
  bool TakeChunk(const v1::Chunk& chunk, const Stream& stream, Writer* writer, grpc::Status* status);
  bool DealWith(const v1::Chunk& chunk, Fate fate, const Stream& stream, Writer* writer,
                grpc::Status* status);
  v1::ComputeResponse Answer(const v1::Chunk& chunk, v1::Disposition disposition) const;
  void AddToWindow(const v1::Chunk& chunk);
  void LoseLocked(const Loss& is);
  grpc::Status PositionError(grpc::StatusCode code, const std::string& message,
                             std::optional<uint64_t> restores = std::nullopt) const;
  void FillHead(v1::Head* head) const;

  mutable std::mutex mutex_;
  std::condition_variable chunk_done_;
  std::string incarnation_ = "incarnation-1";
  uint64_t history_ = 0;
  uint64_t restores_ = 0;
  bool shut_down_ = false;
  uint64_t generation_ = 1;
  v1::ApplyStepRequest last_step_;
  v1::ApplyStepResponse last_step_answer_;
  std::vector<float> window_;
  std::vector<float> weights_;
  uint64_t weight_version_ = 1;
  std::map<std::string, Session> sessions_;                         // by client_key
  std::map<std::tuple<std::string, int, uint64_t>, int> attempts_;  // by client_key, lane and sequence
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
