// lossd client: a trainer's view of a head that lives in a lossd server.
//
//   auto client = lossd::Client::Connect("localhost:50051", {});
//   auto head = (*client)->CreateHead({.name = "lm_head", .vocab_size = V, .hidden_size = H});
//   head->WriteWeights(lossd::DataType::kFloat32, weights);
//   auto session = head->OpenSession({});
//   session->Compute({.labels = labels, .hidden_states = x, ...}, {.losses = losses, .dx = dx});
//   head->Flush({}, session->marks(), gradient);
//
// Errors are absl::Status; nothing throws. All tensors are row-major, dense, little-endian, owned by the
// caller, and only read or written during the call they are passed to.
#ifndef LOSSD_CLIENT_H_
#define LOSSD_CLIENT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lossd/checkpoint.h"
#include "lossd/copies.h"
#include "lossd/flush.h"
#include "lossd/logits.h"
#include "lossd/loss.h"
#include "lossd/optimizer.h"
#include "lossd/region.h"
#include "lossd/weights.h"

namespace lossd {

// Paths of PEM files, read again when they change, for connections that are made from then on.
struct TlsOptions {
  std::string ca_certificates = {};  // of whoever may have signed the server's; empty: the system's roots
  // For servers that let in known clients only (mTLS); both or neither. The key has no passphrase.
  std::string certificate = {};
  std::string key = {};
  // What the server's certificate must be for; empty: the host of the target. For tests, tunnels and
  // addresses that no certificate names.
  std::string server_name = {};
};

// The trace that a call belongs to, in the headers of W3C's Trace Context.
struct TraceContext {
  std::string parent = {};  // traceparent, "00-<trace id>-<span id>-<flags>"; what is not one is not sent
  std::string state = {};   // tracestate; may be empty
};

struct ClientOptions {
  // A call fails with DEADLINE_EXCEEDED after so long without an answer; one that moves tensors, or waits for
  // the server's disks or device, if meanwhile the server did not answer a question whether it is there
  // either. One that is only busy answers that. Where the client knows several replicas, the next one is
  // called.
  std::chrono::milliseconds call_timeout = std::chrono::seconds(30);
  // How long a call goes on trying before it gives up: with UNAVAILABLE if the server cannot be reached, with
  // RESOURCE_EXHAUSTED if it has no room for another session or stream. It waits at least as long as the
  // server asks between two tries, and gives up at once if that is longer than what is left.
  std::chrono::milliseconds reconnect_timeout = std::chrono::seconds(60);
  // Payload bytes of one message of weights or gradient rows.
  int64_t transfer_bytes = 4 << 20;
  // Empty: plain text. A first connection that fails for a reason which waiting cannot mend (the certificate
  // is not trusted, or is another host's, or one side speaks no TLS) fails at once and says what to do.
  std::optional<TlsOptions> tls = {};
  // File with the token that is shown to a server which asks for one (lossd --tokens), and nothing else; read
  // again when it changes. INVALID_ARGUMENT where it would travel in plain text beyond this machine, unless
  // token_over_plain_text says that something else encrypts it on the way. What a token may not do fails with
  // PERMISSION_DENIED, one that the server does not know with UNAUTHENTICATED.
  std::string token_file = {};
  bool token_over_plain_text = false;
  // Asked before every call, mostly in the thread that makes it, sometimes in one of the library's own. The
  // server names the trace in what it logs of the call. The streams of a session belong to the trace in which
  // it was opened. Must not call lossd.
  std::function<TraceContext()> trace = {};
  // Asked in the thread that makes a call, about every 100 ms while it waits. Anything but OK ends the call
  // with it, soon and for good: CANCELLED for a caller that does not want to wait, UNAVAILABLE for a server
  // that is known to be gone. A session of which that cut a batch short is over, as after UNAVAILABLE. Must
  // not use the session that waits.
  std::function<absl::Status()> interrupted = {};
};

struct HeadConfig {
  std::string name;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  DataType weight_type = DataType::kBFloat16;
  // Parts of the loss that belong to the weights; a batch may have its own (LossOptions).
  float logit_scale = 1.0F;  // multiplies x·Wᵀ; finite, above 0
  float softcap = 0.0F;      // c in c·tanh(logit / c); finite, above 0; 0: none
  // The weights are not trained: the server keeps no dW for them, and refuses to flush. dX is as ever.
  bool frozen = false;
  // Logits are logit_scale·(x·Wᵀ + b), b in fp32 [V]. It is written, read and flushed with the weights.
  bool bias = false;
  // What ApplyStep runs at the server, so that no gradient crosses the network. Not for frozen heads.
  OptimizerConfig optimizer = {};
  // The server keeps an fp32 copy of 16-bit weights, which writes, reads as fp32 and the optimizer work on.
  bool master_weights = false;
  // A second gradient at the server: while a flush holds the window, batches of the next one are taken.
  bool double_buffer = false;
  // The server makes sums over the vocabulary (log-sum-exps of rows, dX) over eight fixed segments: results
  // have the same bits on any number of devices, for about 1 % of the time on one CPU and 9 % on an H200
  // (docs/numerics.md). Deterministic sessions have it anyway.
  bool fixed_segments = false;
  // Memory of the server's device, at least 0, in which phase one of batches leaves its exponentials for
  // phase two (Batch::hold). A token takes a little more than vocab_size elements of weight_type. Devices
  // that cannot hold them (all but one Hopper GPU, and it fp32 weights and fixed_segments) take none.
  int64_t held_bytes = 0;
  // [V], each finite and at least 0, not all 0; empty: none. For CreateHead: a server does not tell them,
  // only whether there are any.
  std::vector<float> class_weights = {};
  bool has_class_weights = false;  // as the server tells; CreateHead looks at class_weights alone
};

struct LaneMarks {
  int32_t lane = 0;
  uint64_t accepted = 0;
  uint64_t applied = 0;
};
// `incarnation` and `restores`: of which server they are, and how often its head had been restored by then;
// `generation`: which one that head was known to have come to. A call that names them is IsWindowLost if it
// was restored again since, unless to a checkpoint of this generation that has all of them; where
// `incarnation` is not known (empty), the numbers alone are compared.
struct SessionMarks {
  std::string session_id;
  std::vector<LaneMarks> lanes;
  std::string incarnation = {};
  uint64_t restores = 0;
  uint64_t generation = 0;
};

struct MemoryItem {
  std::string purpose;
  int64_t bytes = 0;
};

enum class WindowState { kOpen, kFreezing, kFrozen };
const char* Name(WindowState state);  // "open", "freezing", "frozen"

struct HeadInfo {
  HeadConfig config;
  uint64_t weight_version = 0;  // 0: no weights yet
  uint64_t generation = 0;
  WindowState window_state = WindowState::kOpen;
  uint64_t window_tokens = 0;
  std::vector<SessionMarks> sessions;  // what a flush has to name
  int64_t open_sessions = 0;
  std::vector<MemoryItem> memory;
  int64_t optimizer_steps = 0;
  int64_t staged_rows = 0;  // that have arrived of a weight write which is not committed yet
  // The id of the flush that holds the window, for AbortFlush, whoever began it; empty: none does.
  std::string flush_id;
  double flush_seconds = 0;  // since it was begun
  // What it takes of the server's host while it is parked (Client::ParkHead), without `memory`; 0: it is not.
  int64_t parked_bytes = 0;
  // Steps of the optimizer since the newest checkpoint that was saved of the head or that it was restored
  // from. None where the server keeps no checkpoints, or without an optimizer.
  std::optional<int64_t> steps_since_checkpoint = {};
};

// One of the processes that compute a server's heads together, each with a device: a rank of the group.
struct RankStatus {
  int32_t rank = 0;  // 0: the leader, which alone talks to clients
  std::string device;
  std::string device_description;
  std::string pci_bus_id;  // of a GPU, as the driver's tools name it
  std::string host;        // by the name that it has for itself
  int64_t memory_limit_bytes = 0;
  int64_t memory_reserved_bytes = 0;
  double uptime_seconds = 0;  // since it was ready
  double waited_seconds = 0;  // of these, for the other ranks: who waits least is the one that they wait for
  // The oldest command that it has to do, and for how long; empty: it has done all.
  std::string command;
  double command_seconds = 0;
  std::string waits_at;  // at what exchange it waits for the others now; else empty
  bool stuck = false;    // the command takes so long that the server says it is not ready
};

// What a server tells of the set of servers that hold replicas of its heads. Counts are since it was started.
struct ReplicaSetStatus {
  std::string name;     // empty: the server's heads are its own
  int32_t replica = 0;  // that the server is
  int32_t replicas = 0;
  bool whole = false;  // all are there: windows end, heads and weights can be written
  // Names who is missing, or, at replica 0, who has not answered for long; empty: windows end.
  std::string why_not;
  uint64_t epochs = 0;  // how often all have met
  uint64_t returns =
      0;  // how often heads here went back to a checkpoint, or were gone, since the replicas were not alike
  uint64_t history = 0;  // their windows' past: another number once they went back to a checkpoint
  // By number, as replica 0 sees them; of other servers none.
  struct Replica {
    int32_t replica = 0;
    uint64_t sessions_placed = 0;  // that were opened there
    // By phase of the end of a window ("seal", "sum", "step", "flush"), in their order: how long after the
    // first one it answered, in seconds; a mean in which the last windows weigh most, or of what it has yet
    // to answer, if that is more.
    std::vector<std::pair<std::string, double>> late_seconds;
  };
  std::vector<Replica> members;
};

struct ServerStatus {
  std::string version;
  std::string incarnation;
  bool draining = false;
  std::string device;
  std::string device_description;
  double uptime_seconds = 0;
  uint64_t chunks_applied = 0;
  uint64_t tokens_applied = 0;
  int64_t queued_chunks = 0;
  std::vector<HeadInfo> heads;
  // What it can do, by the names in docs/compatibility.md. What a call needs and the server lacks is not
  // sent: UNIMPLEMENTED names it.
  std::vector<std::string> features = {};
  // Where heads lie over several devices: the ranks, and how often they were started, this time included.
  // Else none, and 0.
  std::vector<RankStatus> ranks = {};
  int64_t group_epoch = 0;
  ReplicaSetStatus replicas = {};
};

struct ServerMemory {
  int64_t limit_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t process_resident_bytes = 0;
  int64_t process_peak_bytes = 0;
  struct Head {
    std::string name;
    std::vector<MemoryItem> items;
    int64_t row_streams = 0;  // of those below
    int64_t row_stream_bytes = 0;
  };
  std::vector<Head> heads;
  std::vector<MemoryItem> shared;
  // As the device tells, whoever uses it; 0 if it does not.
  int64_t device_total_bytes = 0;
  int64_t device_free_bytes = 0;
  int64_t head_quota_bytes = 0;  // what one head may reserve with all its sessions; 0: no quota
  // Memory for work under way comes on top: credits of sessions, and streams of rows (ReadWeights,
  // ReadGradient) with the rows they may hold until those are read.
  int64_t staging_limit_bytes = 0;
  int64_t staging_reserved_bytes = 0;
  int64_t row_streams = 0;
  int64_t row_stream_bytes = 0;
  // Where heads lie over several devices: what each rank has, the leader's being that above; else none.
  struct Rank {
    int32_t rank = 0;
    int64_t limit_bytes = 0;
    int64_t reserved_bytes = 0;
    int64_t process_resident_bytes = 0;
    int64_t process_peak_bytes = 0;
    std::vector<Head> heads;  // its part of each, without streams of rows
    std::vector<MemoryItem> shared;
    int64_t device_total_bytes = 0;
    int64_t device_free_bytes = 0;
  };
  std::vector<Rank> ranks = {};
};

// Bytes of messages, repeated ones too, without what gRPC and the network add; not what lies in regions.
struct Traffic {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};

// Sessions

enum class Timing { kNone, kReport };
enum class Deterministic { kNo, kYes };

struct SessionOptions {
  // Names this client to the server: a restarted process with the same key resumes the same session. Empty:
  // random.
  std::string client_key = {};
  int32_t rank = 0;
  // Hidden-state bytes of a batch's largest chunks, a teacher's included; 0 takes what suits the server's
  // device (2 MiB for a GPU, 4 MiB for a CPU). Never above the server's limit.
  int64_t chunk_bytes = 0;
  // Connections that a large batch is spread over; batches of less than two of the largest chunks keep to
  // one, and the others are made when the first batch needs them. 0: one for every KiB of a row of the
  // head's weights, at most eight, or one if the server has no room for so many. A session keeps its number
  // for life: a restarted process must ask for the same.
  int32_t lanes = 0;
  // Whether results say when each chunk passed which stage; costs some 60 bytes a chunk.
  Timing timing = Timing::kNone;
  // kYes: what the session adds to dW is bitwise independent of chunks, lanes, arrival and repeats. It has a
  // gradient of its own at the server (RESOURCE_EXHAUSTED if there is no memory for it), to which tiles of
  // its tokens are added by their places in the window; ranks of the sessions of a head must differ then. It
  // costs a product more. Tokens are numbered in the order of the batches, ignored ones too
  // (Batch::window_token says otherwise). hidden_states must not lie in a Region of device memory.
  Deterministic deterministic = Deterministic::kNo;
  // Where heads lie over several devices, lanes are opened at each of the processes that have these, by what
  // the server says: not all payload goes through one. One that cannot be reached there, and a session that
  // is deterministic or has used a Region, has its lanes at the first of these, the server that has the
  // session, as all are with false. Of replicas that is the one which the session was opened at; a session
  // that uses a Region is opened at the one that the client calls.
  bool spread_lanes = true;
  // Memory of the server's host, in bytes, in which it holds the hidden states that kLossOnly brings of
  // batches with a number (Batch::hold), so that phase two does not send them again; at least 0. It should
  // have room for those of all batches between their phases, where a token counts 64 bytes at least, and for
  // a chunk of each lane more; what is held no more is sent. RESOURCE_EXHAUSTED if the server has not so much
  // left of its --staging_bytes, INVALID_ARGUMENT if it never has.
  int64_t held_hidden_bytes = 0;
};

// Where a lane of a session is.
struct LanePlace {
  std::string target;  // that of the client, or another one (SessionOptions::spread_lanes)
  // Why it is at the session's first server although it should be at another. Tried again when the lane is
  // attached anew.
  absl::Status why_not_elsewhere = {};
};

enum class ComputeMode { kLossAndGradients, kLossOnly };

// Tokens of the vocabulary for each token of a batch, one list behind the other.
struct TokenLists {
  std::span<const int64_t> offsets = {};  // [N + 1]: token i has [offsets[i], offsets[i + 1]), from 0 on
  std::span<const int32_t> tokens = {};   // [offsets[N]], each in [0, V), none twice in a list

  bool given() const { return !offsets.empty(); }
};

// Soft targets that come with the batch: how probable each token of a list should be, as the largest
// probabilities of a teacher. What those of a list leave of 1 is that of all other tokens together, which are
// one in the divergence D = KL(targets ‖ head); lists that add up to 1 leave nothing to them. A token's loss
// is label_weight times the cross-entropy, plus the z-loss, plus weight times D (docs/losses.md). Lists that
// add up to more than 1 by more than rounding does (1.0156), or have one below 0, are refused.
struct TargetLists {
  TokenLists lists = {};                      // none empty but of ignored tokens; with the label or not
  std::span<const float> probabilities = {};  // one for each of lists.tokens
  float weight = 1.0f;                        // finite and at least 0
  float label_weight = 0.0f;                  // finite and at least 0

  bool given() const { return lists.given(); }
};

// One batch of tokens; any size >= 0. It is cut into chunks, from which ignored tokens are left out.
// hidden_states, those of a distillation's teacher and BatchOutputs::dx may lie in a Region of this client:
// then they are not sent but read, and written, by the server where they are, and ignored tokens stay in
// their chunks.
struct Batch {
  std::span<const int64_t> labels = {};  // [N]
  DataType hidden_type = DataType::kFloat32;
  const void* hidden_states = nullptr;  // [N, H] of hidden_type
  ComputeMode mode = ComputeMode::kLossAndGradients;
  int64_t ignore_index = -100;
  float gradient_scale = 1.0f;  // multiplies the gradients, not the losses
  int64_t first_token = 0;      // offset of the batch in the trainer's step
  LossOptions loss = {};
  std::optional<Distillation> distillation = {};  // soft targets
  // Values for each token, [N] and finite, or empty. Weights multiply its loss and its gradients. Upstream
  // gradients of its log-sum-exp and of its entropy add to its gradients, which gradient_scale multiplies as
  // a whole. A token whose values here are all 0, its weight among them, travels and costs no more than an
  // ignored one if nothing is wanted of it that is not 0 then: no returns but z_losses. It is a valid token.
  std::span<const float> token_weights = {};
  std::span<const float> lse_gradients = {};
  std::span<const float> entropy_gradients = {};
  // Given: a token's distribution is over its list alone (the kept set of a sampler), in any order and with
  // the label in it; of an ignored token it may be empty. Loss, returns and gradients are of that
  // distribution. INVALID_ARGUMENT together with label_smoothing, a distillation or top_k; UNIMPLEMENTED
  // where heads lie over several devices. Of the longest list there are at most 2^20 tokens, and chunks are
  // cut as if all lists were as long.
  TokenLists kept_tokens = {};
  // INVALID_ARGUMENT together with label_smoothing, a distillation or kept_tokens; UNIMPLEMENTED where heads
  // lie over several devices or have fixed_segments. Limits are those of kept_tokens.
  TargetLists target_lists = {};
  // Multiplies the z-loss's part of the gradients instead of gradient_scale; not for kMean, which has
  // z_normalizer.
  std::optional<float> z_gradient_scale = {};
  Reduction reduction = Reduction::kSum;
  // Counts for kMean, finite and above 0. Unset: those of this batch alone. Of a global batch that is spread
  // over several batches or processes each of them must name the count of the whole: CountValid, or with
  // class weights, which this library does not know, ClassWeightSum, so that it must always be given then.
  // z_normalizer is always a number of valid tokens; unset it is `normalizer` without class weights.
  std::optional<double> normalizer = {};
  std::optional<double> z_normalizer = {};
  // As PyTorch has it: kMean of a batch without valid tokens, over its own count, is NaN and not 0. Gradients
  // are 0 either way, and an empty batch is one without valid tokens.
  bool torch_compat = false;
  // What the head's weights must be, as an earlier BatchResult said: chunks that meet another version are
  // rejected with FAILED_PRECONDITION. For losses with an outer function of their own, in two phases:
  //   1. kLossOnly with `returns`: losses l, log-sum-exps e, entropies h, weight_version.
  //   2. The same tokens with token_weights = ∂L/∂l, lse_gradients = ∂L/∂e, entropy_gradients = ∂L/∂h (if L
  //      is one of them) and that weight_version.
  std::optional<uint64_t> weight_version = {};
  // A number of both phases of one batch, and of no other of this session that is between its phases. By it
  // the head's `held_bytes` keep what phase one has computed, so that phase two costs two products of
  // matrices and not three, and the session's `held_hidden_bytes` its hidden states. 0: nothing is kept.
  // What is there no more is computed again, or sent again; no bits depend on it. Both phases must have the
  // same labels and hidden states: those of phase one count where the session holds them, and otherwise a
  // token whose own logit is another one has NaN for loss and dX. Tokens whose factors are 0 travel where
  // something is kept, unless all are, and are not computed.
  uint64_t hold = 0;
  // Deterministic sessions: the place of the first token among the session's tokens since the last flush.
  // Unset: behind those of the batch before. For batches that may come in any order, and for a process that
  // was restarted in the middle of a window, which cannot know. Every place is taken once: others are
  // rejected with INVALID_ARGUMENT. One that is too far ahead of the first that is missing waits until a lane
  // has brought that, or is rejected with RESOURCE_EXHAUSTED where none can.
  std::optional<int64_t> window_token = {};
};

struct BatchOutputs {
  std::span<float> losses = {};  // [N] or empty if not wanted
  DataType dx_type = DataType::kFloat32;
  // [N, H] of dx_type. Null: not wanted, and neither computed nor sent, which saves a product of three.
  void* dx = nullptr;
  TokenReturns returns = {};
};

// When a chunk passed its stages, by this machine's system clock. What the server tells is brought to it by
// bounds that the messages themselves give: each arrives after it was sent. Where the server's times could be
// right as they are (it is on this machine, or both keep time well) they are left so. A chunk that was sent
// again shows its last journey.
struct ChunkTiming {
  using Time = std::chrono::system_clock::time_point;
  int64_t first_token = 0;  // of the batch
  int64_t tokens = 0;
  Time sent;             // handed to gRPC
  Time received;         // complete at the server
  Time accepted;         // checked and queued
  Time started;          // taken for a batch of the device
  Time input_ready;      // on the device; `started` on a CPU
  Time compute_started;  // and the device is done with the batch before
  Time computed;         // losses and dX, on the device
  Time output_ready;     // in the server's memory; `computed` on a CPU
  Time answered;         // handed to the server's gRPC
  Time arrived;          // complete at the client; not yet in the caller's memory
  // When the device was done with the batch before this one, of whatever session, dW and all. Not known of a
  // server's first batch.
  std::optional<Time> earlier_done = {};
  // What the server's times may be off by, all alike. An upper bound.
  std::chrono::microseconds clock_error{0};
};

struct BatchResult {
  double loss = 0;        // as Batch::reduction says; 0 of a batch without valid tokens
  double loss_sum = 0;    // over valid tokens, unscaled
  double z_loss_sum = 0;  // which loss_sum contains
  int64_t valid_tokens = 0;
  int64_t correct_tokens = 0;           // whose label is predicted; 0 unless predictions are wanted
  double class_weight_sum = 0;          // of the valid tokens' labels; 0 unless class weights count
  double divergence_sum = 0;            // before its weight, times the tokens' weights
  uint64_t weight_version = 0;          // 0 if chunks met different ones: weights were written meanwhile
  uint64_t teacher_weight_version = 0;  // likewise; 0 without a distillation
  int64_t chunks = 0;
  int64_t repeated_chunks = 0;  // the server had taken them before: computed again, not added again
  // Where the batch began, by lane: what ResumeAt takes to have it computed again. Empty if
  // no token was sent.
  std::vector<uint64_t> first_sequences = {};
  // In the order of tokens, over all lanes, if the session asked (SessionOptions::timing) and the server
  // tells; without chunks that were rejected.
  std::vector<ChunkTiming> timings = {};
};

// True for the one error after which the gradients accumulated since the last flush are gone (the server was
// killed, or the head restored from a checkpoint): the trainer replays the window, starting with a new
// session. Its message names the generation. A head that the server has restored may be steps back, and may
// have a part of its window: the trainer goes back to where it saved that checkpoint itself, or opens the
// session again by its client_key and replays what lies behind the marks. A server that was drained and goes
// on with --restore loses nothing: calls wait for it.
bool IsWindowLost(const absl::Status& status);

// A stream of chunks into a head's gradient window, each counted exactly once whatever the network does: a
// lost connection is re-established, the server's marks are read, and what it does not have is sent again.
// Methods may be called from any thread, one at a time (a call made during another waits for it).
class Session {
 public:
  ~Session();  // closes the streams; the session itself lives on at the server until Close() or its lease
               // ends
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;

  // Sends the batch, with reading and writing overlapped, and returns when every loss and dX has arrived.
  // With several lanes it is done by as many threads while the call lasts. Memory used beside the caller's is
  // bounded by the server's byte credit of each lane. If a chunk is rejected the error names it; the batch's
  // other chunks are in the window all the same, and the rejected tokens' outputs are left as they were.
  // Every label is checked before anything is sent. After any other error from the server the fate of the
  // batch is not known, and every later call returns that error: open a new session with the same client_key
  // and look at its marks.
  absl::StatusOr<BatchResult> Compute(const Batch& batch, const BatchOutputs& outputs);

  // For a process that was restarted, with the client_key and the number of lanes of the one before it.
  // marks() right after OpenSession says which sequences of each lane the server has (they were, or will be,
  // applied; nothing above them ever was). The next batch begins at `sequences`, one for each lane, each from
  // 1 to the lane's accepted + 1: what BatchResult::first_sequences said of the batch, or accepted + 1 of the
  // marks() before it, or 1 for the session's first. Chunks that the server has are computed again, so that
  // their losses and dX arrive, and are not added again; so the data, and with them their cut into chunks and
  // over the lanes, must be those of the first time. So must be which tokens have factors of 0 alone, since
  // these are not sent (Batch::token_weights): keep factors that are made of a device's sums, or discard the
  // window. Without this call a session goes on behind its marks.
  absl::Status ResumeAt(const std::vector<uint64_t>& sequences);

  // What the server has accepted of this session: what a flush has to name. True right after OpenSession and
  // after every Compute that succeeded.
  SessionMarks marks() const;
  // Whether the window had something already when the session was opened here, that came with its client_key
  // from an earlier process or handle: who ends that window names its marks, also if nothing is added.
  bool opened_in_window() const;
  const std::string& id() const;          // valid until the next call of Compute
  const std::string& client_key() const;  // valid as long as the session
  int64_t reconnects() const;             // how often a stream was re-established
  // Bytes that the server has set aside (SessionOptions::held_hidden_bytes). A session that was open before
  // may have less than it asked for, if the server has no more.
  int64_t held_hidden_bytes() const;
  std::vector<LanePlace> lane_places()
      const;  // by lane; of one that no batch has used yet, as if it were here

  // Ends the session at the server. What it added to the window stays there.
  absl::Status Close();

 private:
  friend class Head;
  class Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Heads

// A handle to a head; cheap to copy, thread-safe.
class Head {
 public:
  const HeadConfig& config() const;
  absl::StatusOr<HeadInfo> Info() const;

  // Stages all V rows and publishes them as one new weight version, which is returned. `weights` is [V, H] of
  // `type`; it is rounded to the head's dtype before it is sent, unless the server keeps an fp32 master.
  // From the first row again where the server was started again meanwhile, for up to reconnect_timeout.
  absl::StatusOr<uint64_t> WriteWeights(DataType type, const void* weights,
                                        const Progress& progress = {}) const;
  // Reads all rows, of one version, as `type` into `weights` [V, H].
  absl::StatusOr<uint64_t> ReadWeights(DataType type, void* weights, const Progress& progress = {}) const;
  // The same of a head with a bias [V], which is part of the version; each finite. INVALID_ARGUMENT if a head
  // has a bias and none is given here, or the other way round.
  absl::StatusOr<uint64_t> WriteWeights(DataType type, const void* weights, std::span<const float> bias,
                                        const Progress& progress = {}) const;
  absl::StatusOr<uint64_t> ReadWeights(DataType type, void* weights, std::span<float> bias,
                                       const Progress& progress = {}) const;

  // A version written by several processes, each its own rows, and rows read back the same way: of one
  // version, which is returned, into `weights` [rows, H] of `type`.
  absl::StatusOr<WeightWrite> BeginWrite(const WeightWriteOptions& options) const;
  absl::StatusOr<uint64_t> ReadRows(int64_t first_row, int64_t rows, DataType type, void* weights,
                                    const ReadRowsOptions& options = {}) const;
  // The server reads the weights from a safetensors file of its own (--weights_dir) and publishes them.
  absl::StatusOr<LoadedWeights> LoadWeights(const LoadWeightsOptions& options) const;

  // The server mixes the weights of another of its heads into these, without a row over the network: weights
  // = decay * weights + (1 - decay) * source's, in fp32, on the master weights of either if it has them, and
  // rounded once. The new version is returned. INVALID_ARGUMENT if the heads differ in their sizes, type,
  // bias, logit_scale or softcap; FAILED_PRECONDITION without weights, of other versions than those that are
  // named, while a write of these weights is under way, and while this head's window has a gradient (a frozen
  // one has none). After an error that leaves its fate open (UNAVAILABLE, DEADLINE_EXCEEDED) Info() tells by
  // the version whether it was done.
  absl::StatusOr<uint64_t> Blend(const std::string& source, const BlendOptions& options) const;

  // Logits of rows, all of one weight version, which is returned; in several calls if they are many. Needs no
  // session, and nothing of the window moves. FAILED_PRECONDITION of a head without weights.
  absl::StatusOr<uint64_t> Logits(const LogitsBatch& batch, const LogitsOutputs& outputs) const;

  // Takes the session's streams over from an earlier process with the same client_key, if there is one still:
  // that one's calls fail, and marks() of this one are final.
  absl::StatusOr<Session> OpenSession(const SessionOptions& options) const;

  // Freezes the window, reads dW [V, H] as options.dtype into `gradient`, each piece checked against the
  // server's checksum (DATA_LOSS), and commits. If the read is cut it resumes at the row reached; if anything
  // fails for good the window is reopened whole (AbortFlush), so nothing is lost. `marks`: of every session
  // that contributed. `bias_gradient`: db [V], always fp32, of a head with a bias; otherwise empty
  // (INVALID_ARGUMENT if not, and nothing is frozen). FAILED_PRECONDITION if the head is frozen.
  // With options.sink `gradient` is null and `bias_gradient` empty: both go there.
  absl::StatusOr<FlushResult> Flush(const FlushOptions& options, std::span<const SessionMarks> marks,
                                    void* gradient, std::span<float> bias_gradient = {}) const;
  // The same into a safetensors file with the tensor "lm_head.weight.grad" [V, H], and of a head with a bias
  // "lm_head.bias.grad" [V]. The file appears under its name only when it is complete and on disk, and the
  // window is committed after that. INVALID_ARGUMENT if options.sink is set.
  absl::StatusOr<FlushResult> FlushToFile(const FlushOptions& options, std::span<const SessionMarks> marks,
                                          const std::string& path) const;
  // Ends the window without reading it. Its gradient is dropped; the result describes it. `marks` as of
  // Flush.
  absl::StatusOr<FlushResult> Discard(std::span<const SessionMarks> marks) const;
  absl::Status CommitFlush(const std::string& flush_id) const;
  // What sessions have added to the next window of a head with double_buffer goes into the reopened one.
  absl::Status AbortFlush(const std::string& flush_id) const;

  // Everything the server has of the head, as of one moment between two batches, in its folder of
  // checkpoints. A tag that is taken is replaced once the new one is whole. FAILED_PRECONDITION if the server
  // has no such folder, or a flush holds the window; RESOURCE_EXHAUSTED if its disk is full, and nothing has
  // changed. Says that the window is lost (IsWindowLost), and saves nothing, if the head was restored since
  // this process opened a session of it. `marks` as of Flush: the checkpoint has that, or FAILED_PRECONDITION
  // names the difference; of a head over replicas it also says that the window is lost if one of them was
  // with what these sessions had added. None: whatever the window has.
  absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& tag,
                                                 std::span<const SessionMarks> marks = {}) const;
  // Tells of the window's gradient times `gradient_scale`, once `marks` are applied (of every session that
  // contributed; none: of what is applied, without deterministic sessions' unfinished tiles). Nothing moves.
  absl::StatusOr<lossd::GradientStats> GradientStats(std::span<const SessionMarks> marks,
                                                     double gradient_scale = 1) const;
  // One step of the head's optimizer, which consumes the window: new weights, and the next window begins.
  // `marks` as of Flush. Exactly once: it is asked for until there is an answer, and after an error that
  // leaves its fate open (UNAVAILABLE, DEADLINE_EXCEEDED) the next call, which must have the same arguments,
  // is about the same step. FAILED_PRECONDITION without an optimizer, and while a flush holds the window.
  absl::StatusOr<StepResult> ApplyStep(const StepOptions& options, std::span<const SessionMarks> marks) const;

 private:
  friend class Client;
  class Impl;
  explicit Head(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

// A head that the server has made of another one.
struct CopiedHead {
  Head head;
  uint64_t weight_version = 0;  // that it began with, which is the source's
};

// Client

// A connection to one server, or to the replicas of a set. Thread-safe.
class Client {
 public:
  // `target` is a gRPC target: "host:port", "dns:///name:port" or "unix:/path". Of replicas several with
  // commas between them, "host-a:50051,host-b:50051", or a name with the addresses of all: whichever answers
  // is called, and another one when it goes or falls silent. Sessions are where the replicas say, and go on
  // through any of them. Waits until a server answers, up to options.reconnect_timeout. INVALID_ARGUMENT for
  // targets and options that cannot work.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Creates the head, or returns it if it is there with the same configuration.
  absl::StatusOr<Head> CreateHead(const HeadConfig& config);
  absl::StatusOr<Head> GetHead(const std::string& name);
  absl::StatusOr<std::vector<HeadInfo>> ListHeads();
  // The server makes a head `name` of what `source` is between two of its batches, without a row over the
  // network: the same bits in the weights' type, the same version. ALREADY_EXISTS if there is such a head,
  // FAILED_PRECONDITION if the source has no weights, RESOURCE_EXHAUSTED if there is no memory for another
  // head, or no place.
  absl::StatusOr<CopiedHead> CopyHead(const std::string& source, const std::string& name,
                                      const CopyOptions& options = {});
  // Frees the device's memory of a head that nobody uses: all that it is waits in the memory of the server's
  // host (--parking_bytes), and comes back when a call wants it, which waits for that (for as long as
  // ClientOptions::reconnect_timeout); RESOURCE_EXHAUSTED if it has no room then. Handles of it stay good.
  // FAILED_PRECONDITION while it has open sessions, teaches, holds gradients of a deterministic session, or
  // has a write or a flush under way; RESOURCE_EXHAUSTED if there is no room for it there. UNIMPLEMENTED over
  // replicas.
  absl::StatusOr<HeadInfo> ParkHead(const std::string& name);
  // `discard_gradient` is needed while the window is not empty.
  absl::Status DeleteHead(const std::string& name, bool discard_gradient = false);

  // The head is as it was then; of an empty tag, as of its newest checkpoint. One that is not there is
  // created. What sessions added since is undone: their next call says that the window is lost, and those
  // that the checkpoint knows can be opened again by their client_key and go on behind its marks. DATA_LOSS
  // if the checkpoint is damaged, FAILED_PRECONDITION if it is of another configuration: nothing has changed.
  absl::StatusOr<CheckpointInfo> RestoreCheckpoint(const std::string& head, const std::string& tag = {});
  // Newest first; of all heads, also those that are not there, if `head` is empty.
  absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& head = {});
  // For good, also a damaged one, or one of a head that is not there. NOT_FOUND if there is none of this tag.
  // If the answer of an attempt was lost and the next one finds it gone, `info` has head and tag alone.
  absl::StatusOr<DeletedCheckpoint> DeleteCheckpoint(const std::string& head, const std::string& tag);
  // Ends the server as SIGTERM does.
  absl::Status Drain();

  // FAILED_PRECONDITION if the server has no regions (--same_host_regions), is on another host or cannot
  // share this kind of memory; RESOURCE_EXHAUSTED beyond its limits; PERMISSION_DENIED if it runs as another
  // user.
  absl::StatusOr<Region> CreateRegion(RegionKind kind, int64_t bytes);

  absl::StatusOr<ServerStatus> Status();
  absl::StatusOr<ServerMemory> Memory();
  // What this client, its heads and their sessions have sent and received so far.
  Traffic TrafficSoFar() const;

 private:
  class Impl;
  explicit Client(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace lossd

#endif  // LOSSD_CLIENT_H_
