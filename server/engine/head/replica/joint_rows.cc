#include "server/engine/head/replica/joint_rows.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

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
    const auto [slice, rows] = SliceOf(first_);
    const int64_t most = std::min(RowsOfPiece(read_.row_bytes), rows.end() - first_);
    const RowSpan piece{first_, std::min(most, end - first_)};
    first_ = piece.end();
    read_.read(slice, {read_.rows.tensor, piece},
               [self = shared_from_this(), holder = slice, piece](absl::StatusOr<std::string> bytes) {
                 if (!bytes.ok()) return self->done_(bytes.status());
                 absl::Status size = CheckSize(holder, piece, self->read_.row_bytes, *bytes);
                 if (!size.ok()) return self->done_(std::move(size));
                 self->take_(piece, *std::move(bytes));
                 self->Go();
               });
  }

 private:
  // The slice that has this row, and its rows that follow each other there.
  std::pair<int32_t, RowSpan> SliceOf(int64_t row) const {
    for (size_t slice = 0; slice < read_.slices.size(); ++slice) {
      for (const RowSpan& rows : read_.slices[slice]) {
        if (row >= rows.first && row < rows.end()) return {static_cast<int32_t>(slice), rows};
      }
    }
    return {0, {row, std::numeric_limits<int64_t>::max() - row}};  // none of the head: who is asked says so
  }

  const JointRead read_;
  const std::function<void(const RowSpan&, std::string)> take_;
  const std::function<void(absl::Status)> done_;
  int64_t first_;  // that has not been asked for
};

}  // namespace

absl::Status CheckSize(int32_t replica, const RowSpan& rows, int64_t row_bytes, const std::string& bytes) {
  if (static_cast<int64_t>(bytes.size()) == rows.count * row_bytes) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("replica ", replica, " was asked for ", rows.count, " rows of ",
                                          row_bytes, " bytes, and has answered ", bytes.size(), " bytes"));
}

void ReadJointRows(JointRead read, std::function<void(const RowSpan& piece, std::string bytes)> take,
                   std::function<void(absl::Status)> done) {
  std::make_shared<Reading>(std::move(read), std::move(take), std::move(done))->Go();
}

}  // namespace lossd::engine
