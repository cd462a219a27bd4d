// A head that lives in a lossd server, through the client library.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_REMOTE_HEAD_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_REMOTE_HEAD_H_

#include <memory>
#include <optional>
#include <string>

#include "client/examples/train_lm/adam.h"
#include "client/examples/train_lm/head.h"
#include "client/tools/connection_options.h"
#include "lossd/client.h"

namespace lossd::train_lm {

enum class HeadLifetime {
  kUntilClosed,  // deleted from the server at the end, whatever happened before
  kKept,         // stays there with its last weights
};

class RemoteHead final : public LossHead {
 public:
  // Creates head `name` on the server at `target` ("host:port") and opens a session. The server runs AdamW
  // for it, on an fp32 master of bf16 weights. FAILED_PRECONDITION if a head of that name is there and has
  // been trained, or holds gradients.
  static absl::StatusOr<std::unique_ptr<RemoteHead>> Open(const std::string& target,
                                                          const tools::ConnectionOptions& connection,
                                                          const std::string& name, const HeadShape& shape,
                                                          HeadPrecision precision, const AdamOptions& adam,
                                                          HeadLifetime lifetime);
  // The same for a run that may have to go back: with `tag`, the head becomes what Save made of it. Its
  // session is deterministic, so that the run's numbers do not depend on where it was interrupted.
  static absl::StatusOr<std::unique_ptr<RemoteHead>> OpenResumable(
      const std::string& target, const tools::ConnectionOptions& connection, const std::string& name,
      const HeadShape& shape, HeadPrecision precision, const AdamOptions& adam,
      const std::optional<std::string>& tag);
  ~RemoteHead() override;

  absl::Status WriteWeights(std::span<const float> weights) override;
  absl::StatusOr<double> LossAndGradients(std::span<const int64_t> labels, std::span<const float> hidden,
                                          float gradient_scale, std::span<float> dx) override;
  absl::StatusOr<double> Loss(std::span<const int64_t> labels, std::span<const float> hidden) override;
  absl::Status Step(double learning_rate) override;
  absl::Status Save(const std::string& tag) override;
  absl::StatusOr<HeadReport> Report() override;
  HeadTraffic Traffic() const override;

 private:
  RemoteHead(std::unique_ptr<Client> client, Head head, SessionOptions session_options,
             HeadLifetime lifetime);

  // The same status, which says whether there is still a server to tidy up at.
  absl::Status Noted(absl::Status status);
  // Opens it with the first batch: before there are weights the server refuses its streams.
  absl::Status EnsureSession();

  const std::unique_ptr<Client> client_;
  const Head head_;
  const SessionOptions session_options_;
  std::optional<Session> session_;
  const HeadLifetime lifetime_;
  bool unreachable_ = false;  // the server, when it was last asked for a loss or a step
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_REMOTE_HEAD_H_
