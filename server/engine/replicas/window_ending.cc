#include "server/engine/replicas/window_ending.h"

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "server/engine/replicas/all_parts.h"
#include "server/engine/replicas/own_part.h"

namespace lossd::engine {
namespace {

class WindowEnding {
 public:
  WindowEnding(const std::shared_ptr<Head>& head, const WindowEnd& end, const JointReplicas& replicas)
      : head_(*head), end_(end), parts_(replicas, std::make_shared<OwnPart>(head, replicas.own)) {}

  void End();

 private:
  // Weights of one version go into the head at all replicas.
  absl::Status NameSource();
  // Tokens of all windows.
  absl::StatusOr<uint64_t> Seal();
  absl::StatusOr<GradientStats> Sum(uint64_t window_tokens);
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
  const absl::StatusOr<uint64_t> tokens = Seal();
  if (!tokens.ok()) return IsReplicaLost(tokens.status()) ? tokens.status() : Refuse(tokens.status());
  if (std::holds_alternative<BlendEnd>(end_.by)) return ChangeWeights({});
  const absl::StatusOr<GradientStats> stats = Sum(*tokens);
  if (!stats.ok()) return stats.status();
  if (const auto* const step = std::get_if<StepRequest>(&end_.by)) return Step(*step, *tokens, *stats);
  if (std::holds_alternative<FlushEnd>(end_.by)) return Hold(*tokens, *stats);
  return EndLook(*tokens, *stats);
}

absl::Status WindowEnding::NameSource() {
  auto* const blend = std::get_if<BlendEnd>(&end_.by);
  if (blend == nullptr || blend->request.source_version != 0) return absl::OkStatus();
  const absl::StatusOr<uint64_t> version = head_.SourceVersion(blend->request);
  if (version.ok()) blend->request.source_version = *version;
  return version.status();
}

absl::StatusOr<uint64_t> WindowEnding::Seal() {
  const auto sealed = parts_.AskAll<uint64_t>(
      ReplicaPhase::kSeal,
      [this](ReplicaPart& part, size_t /*i*/, std::function<void(absl::StatusOr<uint64_t>)> done) {
        part.Seal(end_, std::move(done));
      });
  if (!sealed.ok()) return sealed.status();
  uint64_t all = 0;
  for (const uint64_t tokens : *sealed) all += tokens;
  return all;
}

absl::StatusOr<GradientStats> WindowEnding::Sum(uint64_t window_tokens) {
  const auto summed = parts_.AskTogether<GradientStats>(
      ReplicaPhase::kSum, [window_tokens](ReplicaPart& part, size_t /*i*/,
                                          std::function<void(absl::StatusOr<GradientStats>)> done) {
        part.Sum(window_tokens, std::move(done));
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
