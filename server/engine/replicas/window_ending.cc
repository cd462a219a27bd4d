#include "server/engine/replicas/window_ending.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "server/engine/replicas/all_parts.h"
#include "server/engine/replicas/own_part.h"

namespace lossd::engine {
namespace {

JointSum JointSumOf(const std::vector<SealedWindow>& windows) {
  JointSum sum;
  std::vector<std::pair<int32_t, int32_t>> by_rank;  // replicas
  for (size_t replica = 0; replica < windows.size(); ++replica) {
    sum.window_tokens += windows[replica].tokens;
    for (const int32_t rank : windows[replica].ranks) by_rank.emplace_back(rank, replica);
  }
  std::sort(by_rank.begin(), by_rank.end());
  for (const auto& [rank, replica] : by_rank) sum.sessions.push_back(replica);
  return sum;
}

class WindowEnding {
 public:
  WindowEnding(const std::shared_ptr<Head>& head, const WindowEnd& end, const JointReplicas& replicas)
      : head_(*head), end_(end), parts_(replicas, std::make_shared<OwnPart>(head, replicas.own)) {}

  void End();

 private:
  // Weights of one version go into the head at all replicas.
  absl::Status NameSource();
  // All windows.
  absl::StatusOr<JointSum> Seal();
  absl::StatusOr<GradientStats> Sum(const JointSum& sum);
  absl::Status Step(const StepRequest& request, uint64_t window_tokens, const GradientStats& stats);
  absl::Status ChangeWeights(const JointStep& step);
  absl::Status Hold(uint64_t window_tokens, const GradientStats& stats);
  absl::Status EndLook(uint64_t window_tokens, const GradientStats& stats);
  absl::Status EndFlush(FlushFate fate);
  // Seals, sums and does what the window ends by. An error of all that follows the seal is a loss.
  absl::Status EndNow();
  // One has refused to seal it: all windows are open again.
  absl::Status Refuse(const absl::Status& why);
  absl::Status ReopenOthers(const absl::Status& why);

  Head& head_;
  WindowEnd end_;
  AllParts parts_;
};

void WindowEnding::End() {
  // Otherwise who waited was told, and another call ends the window.
  if (!head_.IsEnding(end_)) return;
  const absl::Status ended = end_.fate.has_value() ? EndFlush(*end_.fate) : EndNow();
  if (!ended.ok()) head_.TellWaiting(ended, end_.ending);
}

absl::Status WindowEnding::EndNow() {
  if (absl::Status named = NameSource(); !named.ok()) return Refuse(named);
  const absl::StatusOr<JointSum> sealed = Seal();
  if (!sealed.ok()) return IsReplicaLost(sealed.status()) ? sealed.status() : Refuse(sealed.status());
  if (std::holds_alternative<BlendEnd>(end_.by)) return ChangeWeights({});
  const absl::StatusOr<GradientStats> stats = Sum(*sealed);
  if (!stats.ok()) return stats.status();
  const uint64_t tokens = sealed->window_tokens;
  if (const auto* const step = std::get_if<StepRequest>(&end_.by)) return Step(*step, tokens, *stats);
  if (std::holds_alternative<FlushEnd>(end_.by)) return Hold(tokens, *stats);
  return EndLook(tokens, *stats);
}

absl::Status WindowEnding::NameSource() {
  auto* const blend = std::get_if<BlendEnd>(&end_.by);
  if (blend == nullptr || blend->request.source_version != 0) return absl::OkStatus();
  const absl::StatusOr<uint64_t> version = head_.SourceVersion(blend->request);
  if (version.ok()) blend->request.source_version = *version;
  return version.status();
}

absl::StatusOr<JointSum> WindowEnding::Seal() {
  const auto sealed = parts_.AskAll<SealedWindow>(
      ReplicaPhase::kSeal,
      [this](ReplicaPart& part, size_t /*i*/, std::function<void(absl::StatusOr<SealedWindow>)> done) {
        part.Seal(end_, std::move(done));
      });
  if (!sealed.ok()) return sealed.status();
  return JointSumOf(*sealed);
}

absl::StatusOr<GradientStats> WindowEnding::Sum(const JointSum& sum) {
  const auto summed = parts_.AskTogether<GradientStats>(
      ReplicaPhase::kSum,
      [&sum](ReplicaPart& part, size_t /*i*/, std::function<void(absl::StatusOr<GradientStats>)> done) {
        part.Sum(sum, std::move(done));
      });
  if (!summed.ok()) return summed.status();
  return summed->front();
}

absl::Status WindowEnding::Step(const StepRequest& request, uint64_t window_tokens,
                                const GradientStats& stats) {
  const bool refuses = request.non_finite == NonFinite::kSkip && stats.non_finite > 0;
  const JointStep step{
      .stats = stats, .window_tokens = window_tokens, .skipped = refuses || window_tokens == 0};
  return ChangeWeights(step);
}

absl::Status WindowEnding::ChangeWeights(const JointStep& step) {
  const absl::Status changed = parts_.DoTogether(
      ReplicaPhase::kStep,
      [&step](ReplicaPart& part, size_t /*i*/, ReplicaPart::Done done) { part.Step(step, std::move(done)); });
  if (changed.ok()) head_.PublishPart(step);
  return changed;
}

absl::Status WindowEnding::Hold(uint64_t window_tokens, const GradientStats& stats) {
  const FlushInfo flush = head_.DescribeFlush(window_tokens, stats);
  absl::Status held = parts_.DoTogether(ReplicaPhase::kFlush,
                                        [&flush](ReplicaPart& part, size_t /*i*/, ReplicaPart::Done done) {
                                          part.Hold(flush, std::move(done));
                                        });
  return held.ok() ? head_.HoldPart(flush) : held;
}

absl::Status WindowEnding::EndFlush(FlushFate fate) {
  const std::string flush_id = FlushIdOf(end_.by);
  absl::Status ended =
      parts_.DoTogether(ReplicaPhase::kFlush, [&](ReplicaPart& part, size_t /*i*/, ReplicaPart::Done done) {
        part.EndFlush(flush_id, fate, std::move(done));
      });
  return ended.ok() ? head_.EndFlushPart(flush_id, fate) : ended;
}

absl::Status WindowEnding::EndLook(uint64_t window_tokens, const GradientStats& stats) {
  absl::Status open = ReopenOthers(absl::CancelledError("it was looked at"));
  if (open.ok()) head_.EndLook({stats, window_tokens}, end_.ending);
  return open;
}

absl::Status WindowEnding::Refuse(const absl::Status& why) {
  absl::Status open = ReopenOthers(why);
  if (open.ok()) head_.ReopenPart(why, end_.ending);
  return open;
}

absl::Status WindowEnding::ReopenOthers(const absl::Status& why) {
  return parts_.DoTogether(std::nullopt, [&why](ReplicaPart& part, size_t /*i*/, ReplicaPart::Done done) {
    part.Reopen(why, std::move(done));
  });
}

}  // namespace

void EndWindow(const std::shared_ptr<Head>& head, const WindowEnd& end, const JointReplicas& replicas) {
  WindowEnding(head, end, replicas).End();
}

}  // namespace lossd::engine
