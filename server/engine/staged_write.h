// One new set of weights on its way in: row ranges from any number of clients, complete when every row has
// arrived.
#ifndef LOSSD_SERVER_ENGINE_STAGED_WRITE_H_
#define LOSSD_SERVER_ENGINE_STAGED_WRITE_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/engine/head_config.h"
#include "server/engine/host_buffer.h"

namespace lossd::engine {

// Thread-safe: several streams write at once.
class StagedWrite {
 public:
  StagedWrite(std::string id, std::string key, HeadConfig config, HostBuffer buffer);

  const std::string& id() const { return id_; }
  const std::string& key() const { return key_; }

  // Converts rows [first_row, first_row + rows) of `type` to the head's dtype. Rows written before are
  // overwritten. INVALID_ARGUMENT for a range or length that does not fit; FAILED_PRECONDITION once the write
  // was taken.
  absl::Status Write(int64_t first_row, int64_t rows, kernels::DataType type, absl::string_view data);

  // FAILED_PRECONDITION naming the first missing row and how many are missing, if any are.
  absl::Status CheckComplete() const;

  // Hands over the buffer; later writes fail.
  HostBuffer Take();

 private:
  const std::string id_;
  const std::string key_;
  const HeadConfig config_;

  mutable std::mutex mutex_;
  HostBuffer buffer_;
  bool taken_ = false;
  std::vector<bool> present_;
  int64_t missing_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STAGED_WRITE_H_
