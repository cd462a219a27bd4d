#include "client/src/session/lane_places.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd::internal {
namespace {

bool IsPort(absl::string_view text) {
  return !text.empty() && text.size() <= 5 && std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
}

bool IsSocketFile(const std::string& target) { return absl::StartsWith(target, "unix:"); }

}  // namespace

std::string ResolveLaneAddress(const std::string& target, const std::string& address) {
  if (address.empty()) return "";
  const absl::string_view rest(address.data() + 1, address.size() - 1);
  if (address.front() == '.') return IsSocketFile(target) ? absl::StrCat(target, address) : "";
  if (address.front() != ':') return address;
  // Several addresses (ipv4:A:1,B:2) may be several hosts.
  const size_t colon = target.rfind(':');
  const bool one_host = colon != std::string::npos && target.find(',') == std::string::npos;
  if (IsSocketFile(target) || !one_host || !IsPort(rest)) return "";
  if (!IsPort(absl::string_view(target).substr(colon + 1))) return "";
  return absl::StrCat(target.substr(0, colon), address);
}

void LanePlaces::Take(const std::string& target, const std::vector<std::string>& addresses,
                      const std::optional<std::string>& home) {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> places;
  places.reserve(addresses.size());
  for (const std::string& address : addresses) {
    places.push_back(ResolveLaneAddress(target, address));
    if (places.back().empty()) places.back() = home.value_or("");
  }
  if (places != places_) avoided_.clear();  // the server was started anew, or is another one
  places_ = std::move(places);
  elsewhere_ = !home.has_value();
  home_ = home.value_or(places_.empty() ? "" : places_.front());
}

void LanePlaces::KeepHome() {
  const std::lock_guard lock(mutex_);
  all_home_ = true;
}

std::string LanePlaces::home() const {
  const std::lock_guard lock(mutex_);
  return home_;
}

bool LanePlaces::elsewhere() const {
  const std::lock_guard lock(mutex_);
  return elsewhere_;
}

std::string LanePlaces::Of(int32_t lane, Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  if (all_home_ || places_.empty()) return home_;
  const std::string& place = places_[static_cast<size_t>(lane) % places_.size()];
  const auto avoided = avoided_.find(place);
  return avoided != avoided_.end() && now < avoided->second.until ? home_ : place;
}

void LanePlaces::Avoid(const std::string& place, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  const auto [avoided, is_new] = avoided_.try_emplace(place, Avoided{.time = kAvoided, .until = now});
  Avoided& one = avoided->second;
  if (now < one.until) return;
  if (!is_new) one.time = std::min(2 * one.time, kLongestAvoided);
  one.until = now + one.time;
}

void LanePlaces::Reached(const std::string& place) {
  const std::lock_guard lock(mutex_);
  avoided_.erase(place);
}

}  // namespace lossd::internal
