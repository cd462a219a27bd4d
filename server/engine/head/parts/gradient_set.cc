#include "server/engine/head/parts/gradient_set.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <future>
#include <utility>

#include "server/engine/device/gradient_summary.h"
#include "server/engine/device/staging.h"

namespace lossd::engine {
namespace {

constexpr int64_t kSummedBytes = int64_t{4} << 20;

}  // namespace

GradientSet::GradientSet(const HeadConfig& config, HeadBackend* backend, Device* device,
                         std::shared_ptr<Gradient> second)
    : vocab_size_(config.vocab_size),
      hidden_size_(config.hidden_size),
      bias_(config.bias),
      backend_(backend),
      device_(device),
      second_(std::move(second)),
      second_address_(second_.get()) {}

absl::Status GradientSet::Sum(const WindowGradient& of, float scale, int64_t count, float* out, Read read) {
  if (absl::Status status = read(of.window, out); !status.ok()) return status;
  std::vector<float> more(of.sessions.empty() ? 0 : static_cast<size_t>(count));
  for (const Gradient* session : of.sessions) {
    if (absl::Status status = read(session, more.data()); !status.ok()) return status;
    for (size_t i = 0; i < more.size(); ++i) out[i] += more[i];
  }
  if (scale == 1.0f) return absl::OkStatus();
  for (float& value : std::span(out, static_cast<size_t>(count))) value *= scale;
  return absl::OkStatus();
}

absl::Status GradientSet::ReadRows(const WindowGradient& of, float scale, int64_t first_row, int64_t rows,
                                   float* out) {
  return Sum(of, scale, rows * hidden_size_, out, [&](const Gradient* gradient, float* values) {
    return backend_->ReadGradient(gradient, first_row, rows, values);
  });
}

absl::Status GradientSet::ReadBias(const WindowGradient& of, float scale, int64_t first_row, int64_t rows,
                                   float* out) {
  return Sum(of, scale, rows, out, [&](const Gradient* gradient, float* values) {
    return backend_->ReadBiasGradient(gradient, first_row, rows, values);
  });
}

absl::Status GradientSet::ForEachPiece(const WindowGradient& of, float scale,
                                       absl::FunctionRef<void(std::span<const float> rows)> add) {
  const int64_t rows_per_piece = std::max<int64_t>(1, kSummedBytes / 4 / hidden_size_);
  const int64_t piece_bytes = std::min(rows_per_piece, vocab_size_) * hidden_size_ * 4;
  // Where the device writes by itself, if it can. Two, since one piece is read while the one before is added.
  std::array<ResultBytes, 2> memory;
  std::future<void> adding;
  absl::Status status;
  for (int64_t row = 0, turn = 0; row < vocab_size_ && status.ok(); row += rows_per_piece, turn ^= 1) {
    ResultBytes& bytes = memory[static_cast<size_t>(turn)];
    if (bytes.size() == 0) bytes = StagedResult(piece_bytes, device_);
    auto* piece = reinterpret_cast<float*>(bytes.data());
    const int64_t rows = std::min(rows_per_piece, vocab_size_ - row);
    status = ReadRows(of, scale, row, rows, piece);
    if (adding.valid()) adding.get();
    if (!status.ok()) break;
    const std::span<const float> values(piece, static_cast<size_t>(rows * hidden_size_));
    if (row + rows == vocab_size_) {
      add(values);
    } else {
      // Where no thread can be had, get() does it.
      adding = std::async(std::launch::async | std::launch::deferred, [add, values] { add(values); });
    }
  }
  return status;
}

absl::StatusOr<std::vector<float>> GradientSet::Bias(const WindowGradient& of, float scale) {
  std::vector<float> bias(static_cast<size_t>(vocab_size_));
  if (absl::Status status = ReadBias(of, scale, 0, vocab_size_, bias.data()); !status.ok()) return status;
  return bias;
}

absl::StatusOr<GradientStats> GradientSet::Stats(const WindowGradient& of, double scale) {
  if (!of.sessions.empty()) return StatsHere(of, static_cast<float>(scale));
  const absl::StatusOr<GradientTallies> tallies = backend_->Summarize(of.window, scale);
  if (!tallies.ok()) return tallies.status();
  return StatsOf(*tallies);
}

absl::StatusOr<GradientStats> GradientSet::StatsHere(const WindowGradient& of, float scale) {
  GradientSummary dw;
  const auto add = [&dw](std::span<const float> rows) { dw.Add(rows); };
  if (absl::Status status = ForEachPiece(of, scale, add); !status.ok()) return status;
  GradientSummary db;
  if (bias_) {
    const absl::StatusOr<std::vector<float>> bias = Bias(of, scale);
    if (!bias.ok()) return bias.status();
    db.Add(*bias);
  }
  return GradientStats{.norm = dw.norm(),
                       .bias_norm = db.norm(),
                       .largest = std::max(dw.largest(), db.largest()),
                       .non_finite = dw.non_finite() + db.non_finite()};
}

absl::Status GradientSet::FoldSessions(const WindowGradient& of) {
  for (Gradient* session : of.sessions) {
    if (absl::Status folded = backend_->Fold(session, of.window); !folded.ok()) return folded;
  }
  return absl::OkStatus();
}

void GradientSet::Reset(const WindowGradient& of) {
  backend_->Reset(of.window);
  for (Gradient* session : of.sessions) backend_->Reset(session);
}

}  // namespace lossd::engine
