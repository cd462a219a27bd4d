// One new set of weights on its way in: row ranges from any number of clients, complete when every row has
// arrived.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_STAGED_WRITE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_STAGED_WRITE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/weight_buffers.h"

namespace lossd::engine {

// Thread-safe: several streams write at once.
class StagedWrite {
 public:
  // `buffers` are of the head's sizes.
  StagedWrite(std::string id, std::string key, HeadConfig config, WeightBuffers buffers);

  const std::string& id() const { return id_; }
  const std::string& key() const { return key_; }

  // Converts rows [first_row, first_row + rows) of `type` to the head's dtype. Rows written before are
  // overwritten. `bias`: fp32 [rows], all finite, if the head has one, otherwise empty. INVALID_ARGUMENT, and
  // nothing is written, for a range, a length or a bias that does not fit. INVALID_ARGUMENT for weights that
  // are not finite in HeadConfig::weight_type: their row is missing then. FAILED_PRECONDITION once the write
  // was taken.
  absl::Status Write(int64_t first_row, int64_t rows, kernels::DataType type, absl::string_view data,
                     absl::string_view bias = {});

  int64_t rows() const;  // that have arrived

  // Rows as they are kept, [rows, H] of HeadConfig::master_type, and of the bias, fp32 [rows] if the head has
  // one. FAILED_PRECONDITION once the write was taken.
  struct Rows {
    std::string weights;
    std::string bias;
  };
  absl::StatusOr<Rows> Read(int64_t first_row, int64_t rows) const;

  // FAILED_PRECONDITION naming the first missing row and how many are missing, if any are.
  absl::Status CheckComplete() const;

  // Hands over the buffers; later writes fail.
  WeightBuffers Take();

 private:
  absl::Status CheckBias(int64_t first_row, int64_t rows, absl::string_view bias) const;
  absl::Status CheckThereLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CopyRowLocked(int64_t row, kernels::DataType type, const char* from)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MarkLocked(int64_t row, bool is_there) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string id_;
  const std::string key_;
  const HeadConfig config_;

  mutable Mutex mutex_;
  WeightBuffers buffers_ ABSL_GUARDED_BY(mutex_);
  bool taken_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::byte> narrow_ ABSL_GUARDED_BY(mutex_);  // a row in the type of the weights
  std::vector<bool> present_ ABSL_GUARDED_BY(mutex_);
  int64_t missing_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_STAGED_WRITE_H_
