#include "server/engine/device/sharded/replica_rendezvous.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {

using kernels::collectives::Code;
using kernels::collectives::Result;

namespace {

// The ranks of a group wait for their leader, which waits for the others no longer than it is told to. That
// one of them is lost ends the group's rendezvous.
constexpr std::chrono::milliseconds kGroupTimeout = std::chrono::hours(24);

// Texts as one, each behind its length.
std::string Joined(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& text : texts) absl::StrAppend(&joined, text.size(), ":", text);
  return joined;
}

// None if that makes no sense.
std::optional<std::vector<std::string>> Parted(absl::string_view joined) {
  std::vector<std::string> texts;
  while (!joined.empty()) {
    const size_t colon = joined.find(':');
    size_t size = 0;
    if (colon == absl::string_view::npos || !absl::SimpleAtoi(joined.substr(0, colon), &size)) {
      return std::nullopt;
    }
    joined.remove_prefix(colon + 1);
    if (size > joined.size()) return std::nullopt;
    texts.emplace_back(joined.substr(0, size));
    joined.remove_prefix(size);
  }
  return texts;
}

}  // namespace

Result ReplicaRendezvous::Say(Said what, const std::string& text, std::chrono::milliseconds timeout,
                              std::string* verdict) {
  if (!over_.ok()) return over_;
  std::vector<std::string> said;
  over_ = place_.rendezvous->AllGather(absl::StrCat(Letter(what), text), kGroupTimeout, &said);
  if (!over_.ok()) return over_;
  over_ =
      place_.rendezvous->AllGather(replicas_ == nullptr ? "-" : Judge(said, timeout), kGroupTimeout, &said);
  if (!over_.ok()) return over_;
  *verdict = std::move(said.front());
  const bool device = absl::StartsWith(*verdict, Letter(Said::kDeviceFailed));
  if (verdict->empty() || device || absl::StartsWith(*verdict, Letter(Said::kFailed))) {
    over_ = {device ? Code::kDeviceFailed : Code::kPeerLost,
             verdict->substr(std::min<size_t>(1, verdict->size()))};
  }
  return over_;
}

std::string ReplicaRendezvous::Judge(const std::vector<std::string>& said,
                                     std::chrono::milliseconds timeout) {
  const auto failed = [](absl::string_view why) { return absl::StrCat(Letter(Said::kFailed), why); };
  std::vector<std::string> offers;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank].empty()) return failed(absl::StrCat("rank ", rank, " says nothing"));
    for (const Said what : {Said::kFailed, Said::kDeviceFailed}) {
      if (!absl::StartsWith(said[rank], Letter(what))) continue;
      return absl::StrCat(Letter(what), "rank ", rank, ": ", said[rank].substr(1));
    }
    if (said[rank].front() != said.front().front()) {
      return failed(absl::StrCat("rank ", rank, " connects in another way than rank 0"));
    }
    offers.push_back(said[rank].substr(1));
  }
  if (said.front().front() == static_cast<char>(Said::kDone)) return said.front();
  std::vector<std::string> groups;
  const Result gathered = replicas_->AllGather(Joined(offers), timeout, &groups);
  if (!gathered.ok()) return failed(gathered.message());
  return absl::StrCat(Letter(Said::kOffer), Joined(groups));
}

Result ReplicaRendezvous::AllGather(std::string own, std::chrono::milliseconds timeout,
                                    std::vector<std::string>* all) {
  std::string verdict;
  if (Result said = Say(Said::kOffer, own, timeout, &verdict); !said.ok()) return said;
  // Each group's offers, and of those the one of this rank.
  const std::optional<std::vector<std::string>> groups = Parted(absl::string_view(verdict).substr(1));
  if (!groups.has_value()) return {Code::kMismatch, "what the leader has gathered makes no sense"};
  all->clear();
  for (const std::string& group : *groups) {
    std::optional<std::vector<std::string>> offers = Parted(group);
    if (!offers.has_value() || offers->size() != static_cast<size_t>(place_.ranks)) {
      return {Code::kMismatch,
              absl::StrCat("replica ", all->size(), " has not ", place_.ranks, " ranks, as this one has")};
    }
    all->push_back(std::move((*offers)[static_cast<size_t>(place_.rank)]));
  }
  return {};
}

absl::Status ReplicaRendezvous::Finish(const absl::Status& own) {
  std::string verdict;
  const Said failed = absl::IsInternal(own) ? Said::kDeviceFailed : Said::kFailed;
  const Result said =
      Say(own.ok() ? Said::kDone : failed, std::string(own.message()), kGroupTimeout, &verdict);
  return own.ok() ? ToStatus(said) : own;
}

}  // namespace lossd::engine
