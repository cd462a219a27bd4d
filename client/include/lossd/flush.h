// What lossd::Head::Flush takes and gives. Part of lossd/client.h.
#ifndef LOSSD_FLUSH_H_
#define LOSSD_FLUSH_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "lossd/loss.h"
#include "lossd/weights.h"

namespace lossd {

// Rows [first_row, first_row + rows) of dW, [rows, H] of FlushOptions::dtype, and of a head with a bias db
// [rows], otherwise empty. Valid during the call.
using GradientSink = std::function<absl::Status(int64_t first_row, int64_t rows, const void* gradient,
                                                std::span<const float> bias_gradient)>;

struct FlushOptions {
  DataType dtype = DataType::kFloat32;  // narrower types are rounded by the server before sending
  // Multiplies the gradient before it is rounded, and what FlushResult::norm is of. Finite. What an abort
  // leaves in the window is not scaled.
  float gradient_scale = 1.0F;
  Progress progress = {};
  // false leaves the window frozen after a successful read: the caller ends it with CommitFlush or
  // AbortFlush.
  bool commit = true;
  // Called once the window is frozen: the marks of sessions may move again. What they compute from now on
  // belongs to the next window; of a head with double_buffer it is taken at once, otherwise at the commit.
  std::function<void()> on_frozen = {};
  // For Flush without a gradient [V, H] in memory: is given the rows as they arrive, in order, each exactly
  // once, also where a cut read is resumed. Called from the thread that flushes. An error ends the flush,
  // which returns it as CANCELLED, and leaves the window whole. Rows that arrive damaged are not given: the
  // flush ends with DATA_LOSS.
  GradientSink sink = {};
  // Asked once the gradient was taken whole, before the window is ended or left frozen, by the thread that
  // flushes. If it returns false the flush fails with CANCELLED and leaves the window whole.
  std::function<bool()> confirm = {};
};

struct FlushResult {
  std::string flush_id;
  uint64_t generation = 0;  // the one that was flushed
  int64_t rows = 0;
  int64_t columns = 0;
  double norm = 0;
  double bias_norm = 0;  // of the bias's gradient; 0 of a head without one
  uint64_t window_tokens = 0;
  int64_t non_finite = 0;  // of the bias's gradient as well
};

// The flush that an error of Flush, FlushToFile, Discard or ApplyStep is about, if it is one of these two:
//
// UNAVAILABLE, DEADLINE_EXCEEDED and the like: the gradient was read whole (or, of Discard, is not wanted),
// but the commit has no answer. The window may have ended or be frozen still. CommitFlush of its flush_id may
// be repeated until there is an answer, and then what was read is the gradient; AbortFlush reopens the window
// if it has not ended. Or the call itself is made again: the next Flush, FlushToFile, Discard or ApplyStep of
// the same Head begins by repeating the commit.
//
// ALREADY_EXISTS: of such a next call. The commit is done now; what the call before read is the gradient,
// each row of which was given once, and nothing was read or dropped of the window behind it: the call is made
// again if it is meant for that one. Exceptions: Discard with the marks of the flush that was committed has
// done what it was asked for, and returns that flush; ApplyStep with a generation goes on.
std::optional<FlushResult> FlushOf(const absl::Status& status);

}  // namespace lossd

#endif  // LOSSD_FLUSH_H_
