// The inside of lossd::Session: its lanes, one call at a time.
#ifndef LOSSD_CLIENT_SRC_SESSION_SESSION_H_
#define LOSSD_CLIENT_SRC_SESSION_SESSION_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/batch/batch_places.h"
#include "client/src/batch/sent_tokens.h"
#include "client/src/common/head_context.h"
#include "client/src/session/batch_run.h"
#include "client/src/session/held_batches.h"
#include "client/src/session/lane_run.h"
#include "client/src/session/lane_set.h"
#include "lossd/client.h"

namespace lossd {

class Session::Impl {
 public:
  // `options.client_key` must be set.
  static absl::StatusOr<std::unique_ptr<Impl>> Open(std::shared_ptr<internal::HeadContext> head,
                                                    const SessionOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  absl::StatusOr<BatchResult> Compute(const Batch& batch, const BatchOutputs& outputs);
  absl::Status ResumeAt(const std::vector<uint64_t>& sequences);
  SessionMarks marks() const;
  bool opened_in_window() const { return lanes_.link().opened_in_window(); }
  const std::string& id() const { return lanes_.link().session_id(); }
  const std::string& client_key() const { return lanes_.link().options().client_key; }
  int64_t reconnects() const;
  int64_t held_hidden_bytes() const { return lanes_.link().held_hidden_bytes(); }
  std::vector<LanePlace> lane_places() const;
  absl::Status Close();

 private:
  Impl(std::shared_ptr<internal::HeadContext> head, const SessionOptions& options);
  absl::Status CheckAlive() const;
  internal::HiddenStates HiddenStatesOf(const Batch& batch, const internal::BatchPlaces& places) const;
  // Its lanes are ready.
  absl::StatusOr<BatchResult> Send(const Batch& batch, const BatchOutputs& outputs,
                                   const internal::BatchPlaces& places, const internal::SentTokens& sent);
  void NoteHeld(const Batch& batch, const internal::SentTokens& sent, const internal::BatchRun& run);
  absl::Status Interrupted(const absl::Status& cause) const;

  const std::shared_ptr<internal::HeadContext> head_;
  mutable std::mutex mutex_;  // held during a call: one at a time
  internal::LaneSet lanes_;
  // Since ResumeAt, in that session: by lane, up to where the server had it.
  std::vector<uint64_t> expected_repeats_;
  std::string resumed_session_;
  internal::HeldBatches held_;
  bool closed_ = false;
  absl::Status failure_;
};

}  // namespace lossd

#endif  // LOSSD_CLIENT_SRC_SESSION_SESSION_H_
