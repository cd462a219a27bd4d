// Rows that go from one replica of a head to another.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

absl::StatusOr<int64_t> Head::PartRowBytes(const std::string& tensor) const {
  if (tensor.empty()) return (config_.hidden_size + (config_.bias ? 1 : 0)) * int64_t{sizeof(float)};
  for (const StateTensor& one : backend_->StateTensors()) {
    if (one.name == tensor) return one.columns * kernels::SizeOf(one.type);
  }
  return absl::NotFoundError(absl::StrCat("head ", config_.name, " has no tensor '", tensor, "'"));
}

absl::StatusOr<int64_t> Head::CheckPartRows(const PartRows& rows) const {
  if (absl::Status alive = CheckAlive(); !alive.ok()) return alive;
  const absl::StatusOr<int64_t> row_bytes = PartRowBytes(rows.tensor);
  if (!row_bytes.ok()) return row_bytes;
  const auto [first, count] = rows.rows;
  const bool inside = first >= 0 && count >= 0 && first <= config_.vocab_size - count;
  if (inside && count <= RowsOfPiece(*row_bytes)) return count * *row_bytes;
  return absl::InvalidArgumentError(absl::StrCat("rows from ", first, ", ", count, " of them: head ",
                                                 config_.name, " has ", config_.vocab_size, ", of which ",
                                                 RowsOfPiece(*row_bytes), " go at once"));
}

void Head::ReadPartRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) {
  environment_.scheduler->Post(nullptr, [self = shared_from_this(), rows, done = std::move(done)] {
    const absl::StatusOr<int64_t> size = self->CheckPartRows(rows);
    if (!size.ok()) return done(size.status());
    std::string bytes(static_cast<size_t>(*size), '\0');
    absl::Status read = self->ReadHeldRows(rows, bytes.data());
    if (!read.ok()) return done(std::move(read));
    done(std::move(bytes));
  });
}

void Head::WritePartRows(const PartRows& rows, std::string bytes, std::function<void(absl::Status)> done) {
  environment_.scheduler->Post(
      nullptr, [self = shared_from_this(), rows, bytes = std::move(bytes), done = std::move(done)] {
        const absl::StatusOr<int64_t> size = self->CheckPartRows(rows);
        if (!size.ok()) return done(size.status());
        if (absl::Status begun = self->BeginOverwriting(); !begun.ok()) return done(begun);
        if (static_cast<int64_t>(bytes.size()) != *size) {
          return done(
              absl::InvalidArgumentError(absl::StrCat(bytes.size(), " bytes were sent for rows of ", *size)));
        }
        done(self->WriteHeldRows(rows, bytes.data()));
      });
}

absl::Status Head::ReadHeldRows(const PartRows& rows, char* to) {
  const auto [first, count] = rows.rows;
  if (!rows.tensor.empty()) return backend_->ReadState(rows.tensor, first, count, to);
  std::vector<float> values(static_cast<size_t>(count * (config_.hidden_size + (config_.bias ? 1 : 0))));
  absl::Status read = backend_->ReadSum(first, count, values.data());
  if (read.ok() && config_.bias) {
    read = backend_->ReadBiasSum(first, count, values.data() + count * config_.hidden_size);
  }
  if (read.ok()) std::copy_n(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float), to);
  return read;
}

absl::Status Head::WriteHeldRows(const PartRows& rows, const char* from) {
  const auto [first, count] = rows.rows;
  if (!rows.tensor.empty()) return backend_->WriteState(rows.tensor, first, count, from);
  return absl::InvalidArgumentError("rows of a sum are not written");
}

// Rows of the master, of which each replica has a part

absl::StatusOr<WeightsPlace> Head::WeightsPlaceLocked() const {
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (absl::Status weights = weights_.CheckPresent(); !weights.ok()) return weights;
  if (absl::Status none = CheckNothingPreparedLocked(); !none.ok()) return none;
  return WeightsPlace{weights_.version(), history_.restores(), window_.ending()};
}

void Head::ReadJointWeights(const WantedRows& wanted, std::function<void(absl::StatusOr<uint64_t>)> done) {
  absl::StatusOr<WeightsPlace> place;
  {
    const MutexLock lock(mutex_);
    place = WeightsPlaceLocked();
    if (place.ok() && window_.state() == WindowState::kSealing) {
      WaitBehindLocked(done,
                       [wanted](Head& head, const std::function<void(absl::StatusOr<uint64_t>)>& again) {
                         head.ReadJointWeights(wanted, again);
                       });
      return;
    }
  }
  if (!place.ok()) return done(place.status());
  const int64_t columns = config_.hidden_size;
  JointRead read{
      .slices = slices_,
      .rows = {.tensor = kMasterTensor, .rows = wanted.rows},
      .row_bytes = columns * int64_t{sizeof(float)},
      .read = [self = shared_from_this()](int32_t replica, const PartRows& piece,
                                          std::function<void(absl::StatusOr<std::string>)> answer) {
        self->ReadPartOf(replica, piece, std::move(answer));
      }};
  ReadJointRows(
      std::move(read),
      [wanted, columns](const kernels::RowSpan& piece, const std::string& bytes) {
        const int64_t place_of_piece = (piece.first - wanted.rows.first) * columns;
        kernels::Convert(
            kernels::DataType::kFloat32, bytes.data(), wanted.type,
            static_cast<char*>(wanted.out.matrix) + place_of_piece * kernels::SizeOf(wanted.type),
            piece.count * columns);
      },
      [self = shared_from_this(), wanted, before = *place, done = std::move(done)](absl::Status status) {
        if (!status.ok()) return done(std::move(status));
        self->environment_.scheduler->Post(
            self.get(), [self, wanted, before, done] { self->EndJointRead(wanted, before, done); });
      });
}

void Head::EndJointRead(const WantedRows& wanted, const WeightsPlace& before,
                        const std::function<void(absl::StatusOr<uint64_t>)>& done) {
  absl::StatusOr<WeightsPlace> now;
  {
    const MutexLock lock(mutex_);
    now = WeightsPlaceLocked();
  }
  if (!now.ok()) return done(now.status());
  // Some rows may be of the weights before, others of those after.
  if (*now != before) return ReadJointWeights(wanted, done);
  absl::Status status;
  if (wanted.out.bias != nullptr && config_.bias) {
    status = backend_->ReadBias(wanted.rows.first, wanted.rows.count, wanted.out.bias);
  }
  if (status.ok()) return done(now->version);
  OnDeviceFailure(status);
  done(status);
}

}  // namespace lossd::engine
