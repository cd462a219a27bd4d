// Heads that begin as another one is.
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/engine.h"

namespace lossd::engine {
namespace {

HeadConfig CopyConfig(HeadConfig config, const HeadCopy& copy) {
  config.name = copy.name;
  if (copy.training == HeadCopy::Training::kFrozen) {
    config.weight_gradients = WeightGradients::kFrozen;
    config.optimizer = {};
    config.double_buffer = false;
    config.master_weights = false;
    config.held_bytes = 0;  // nobody asks for its gradients
  }
  if (copy.master == HeadCopy::Master::kKept && config.weight_type != kernels::DataType::kFloat32) {
    config.master_weights = true;
  }
  return config;
}

// The head that is there, if this call has made it before.
absl::StatusOr<CopiedHead> FoundCopy(std::shared_ptr<Head> there, const HeadCopy& copy) {
  const std::optional<uint64_t> version = there->VersionOfWrite(NoteOfCopy(copy.copy_id));
  if (version.has_value()) return CopiedHead{std::move(there), *version};
  return MakeError(absl::StatusCode::kAlreadyExists, RejectReason::kConflict, "name",
                   absl::StrCat("head ", copy.name,
                                " exists: give the copy another name, delete that head "
                                "first, or have the source's weights go into it (BlendHead)"));
}

}  // namespace

absl::StatusOr<CopiedHead> Engine::CopyHead(const HeadCopy& copy) {
  if (copy.name == copy.source) {
    return Invalid(RejectReason::kOption, "name",
                   absl::StrCat("name is ", copy.name, ", which is the source; give the copy another name"));
  }
  if (options_.copy_together == nullptr) return CopyHere(copy);
  // The other replicas copy the version that was copied here, or none.
  HeadCopy here_and_there = copy;
  const auto copy_here = [&]() -> absl::StatusOr<std::shared_ptr<Head>> {
    absl::StatusOr<CopiedHead> copied = CopyHere(copy);
    if (!copied.ok()) return copied.status();
    here_and_there.source_version = copied->weight_version;
    return copied->head;
  };
  const auto together = [&](absl::FunctionRef<absl::Status()> here) {
    return options_.copy_together(here_and_there, here);
  };
  absl::StatusOr<std::shared_ptr<Head>> head = CreateTogether(copy.name, copy_here, together);
  if (!head.ok()) return head.status();
  return CopiedHead{*std::move(head), here_and_there.source_version};
}

absl::StatusOr<CopiedHead> Engine::CopyHere(const HeadCopy& copy) {
  const MutexLock creating(create_mutex_);
  for (const std::string& name : {copy.name, copy.source}) {
    if (absl::Status back = BringBack(name); !back.ok()) return back;
  }
  if (absl::StatusOr<std::shared_ptr<Head>> there = FindHere(copy.name); there.ok()) {
    return FoundCopy(*std::move(there), copy);
  }
  const absl::StatusOr<std::shared_ptr<Head>> source = FindHere(copy.source);
  if (!source.ok()) return source.status();
  if (absl::Status can = (*source)->CheckCopied(copy.source_version); !can.ok()) return can;
  return MakeCopy(**source, copy);
}

absl::StatusOr<CopiedHead> Engine::MakeCopy(Head& source, const HeadCopy& copy) {
  const HeadConfig config = CopyConfig(source.config(), copy);
  if (absl::Status can = CheckCreated(config); !can.ok()) return can;
  absl::StatusOr<std::shared_ptr<Head>> head = MakeHead(config);
  if (!head.ok()) return head.status();
  std::promise<absl::StatusOr<uint64_t>> copied;
  (*head)->CopyFrom(source.shared_from_this(), copy.source_version, copy.copy_id,
                    [&copied](absl::StatusOr<uint64_t> version) { copied.set_value(std::move(version)); });
  const absl::StatusOr<uint64_t> version = copied.get_future().get();
  if (version.ok()) {
    AddHead(*head);
    return CopiedHead{*std::move(head), *version};
  }
  // Its memory is free again when the caller hears of it.
  (*head)->MarkDeleted(version.status(), DiscardGradient::kYes).IgnoreError();
  ReleaseEnded(**head);
  return version.status();
}

}  // namespace lossd::engine
