// Which of its pasts a head goes on from.
//
// Marks are numbers, which each restore lets begin again at those of the checkpoint: in two pasts the same
// numbers may stand for other chunks. They mean in the present what they meant in another past if that was
// saved, the checkpoint was restored, and they are not beyond it.
//
// Thread-compatible: guarded by Head::mutex_.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_HISTORY_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_HISTORY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/chunk/session_marks.h"

namespace lossd::engine {

// A past that the present goes on from, up to where it was saved.
struct Ancestor {
  HeadPast past;
  uint64_t generation = 0;
  std::vector<SessionMarks> marks;  // of every session; a session or lane that is not there had none
};

class HeadHistory {
 public:
  explicit HeadHistory(std::string incarnation) : now_{std::move(incarnation), 0} {}

  const HeadPast& now() const { return now_; }
  // How often the head was put back to a checkpoint; going on after a drain does not count.
  uint64_t restores() const { return now_.restores; }
  // What `restores` was when the checkpoint of the last restore in this window was saved. None without such a
  // restore, or if another incarnation saved it.
  std::optional<uint64_t> restored_from() const;
  // Those from which this window comes, the last one last.
  const std::vector<Ancestor>& ancestors() const { return ancestors_; }

  // Whether `marks`, named for the window of `generation`, mean now what they meant where they are of.
  bool Has(uint64_t generation, const SessionMarks& marks) const;

  // The head goes on after a drain.
  void Continue(uint64_t restores, std::vector<Ancestor> ancestors);
  // The head was put back to where it was `saved`; `before` are the ancestors of that.
  void Restore(uint64_t restores, std::vector<Ancestor> before, Ancestor saved);
  // Nobody names an earlier window.
  void BeginWindow() { ancestors_.clear(); }

 private:
  void ForgetTheFirst();

  HeadPast now_;
  std::vector<Ancestor> ancestors_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_HISTORY_H_
