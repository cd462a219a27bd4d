// The features of a connected server, from its own list. A request that needs another one is not sent.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_SERVER_FEATURES_H_
#define LOSSD_CLIENT_SRC_CONNECTION_SERVER_FEATURES_H_

#include <google/protobuf/message.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "lossd/v1/status.pb.h"
#include "proto/wire/features.h"

namespace lossd::internal {

// Thread-safe. Until something is noted every request is supported.
class ServerFeatures {
 public:
  // `target`: how errors call the server's place.
  explicit ServerFeatures(std::string target) : target_(std::move(target)) {}

  void Note(const v1::GetStatusResponse& status);
  // UNIMPLEMENTED names what `request` needs and the server lacks. Looks at the request only if it lacks
  // anything that this client knows.
  absl::Status Check(const google::protobuf::Message& request) const;

 private:
  const std::string target_;
  std::atomic<bool> lacks_nothing_ = true;
  mutable std::mutex mutex_;
  wire::Features features_;
  std::string version_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_SERVER_FEATURES_H_
