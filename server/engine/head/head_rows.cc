// Rows that go from one replica of a head to another.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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

}  // namespace lossd::engine
