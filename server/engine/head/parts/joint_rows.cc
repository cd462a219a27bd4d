#include "server/engine/head/parts/joint_rows.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace lossd::engine {
namespace {

using kernels::RowSpan;

class Reading : public std::enable_shared_from_this<Reading> {
 public:
  Reading(JointRead read, std::function<void(const RowSpan&, std::string)> take,
          std::function<void(absl::Status)> done)
      : read_(std::move(read)),
        take_(std::move(take)),
        done_(std::move(done)),
        first_(read_.rows.rows.first) {}

  void Go() {
    const int64_t end = read_.rows.rows.end();
    if (first_ >= end) return done_(absl::OkStatus());
    int32_t slice = 0;
    while (read_.layout.Slice(slice).end() <= first_) ++slice;
    const int64_t most = std::min(RowsOfPiece(read_.row_bytes), read_.layout.Slice(slice).end() - first_);
    const RowSpan piece{first_, std::min(most, end - first_)};
    first_ = piece.end();
    const int32_t holder = read_.layout.Steps(read_.own, slice) ? read_.own : slice;
    read_.read(holder, {read_.rows.tensor, piece},
               [self = shared_from_this(), piece](absl::StatusOr<std::string> bytes) {
                 if (!bytes.ok()) return self->done_(bytes.status());
                 self->take_(piece, *std::move(bytes));
                 self->Go();
               });
  }

 private:
  const JointRead read_;
  const std::function<void(const RowSpan&, std::string)> take_;
  const std::function<void(absl::Status)> done_;
  int64_t first_;  // that has not been asked for
};

}  // namespace

void ReadJointRows(JointRead read, std::function<void(const RowSpan& piece, std::string bytes)> take,
                   std::function<void(absl::Status)> done) {
  std::make_shared<Reading>(std::move(read), std::move(take), std::move(done))->Go();
}

}  // namespace lossd::engine
