#include "server/rpc/lanes/relay_records.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::rpc {
namespace {

absl::Status Senseless(const RelayKey& key, const std::string& what) {
  return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, "message",
                           absl::StrCat("relay ", key.relay, " of rank ", key.rank, " ", what));
}

}  // namespace

absl::Status RelayRecords::Begin(const RelayKey& key) {
  const engine::MutexLock lock(mutex_);
  return records_.try_emplace(key).second ? absl::OkStatus() : Senseless(key, "is there already");
}

absl::Status RelayRecords::Note(const RelayKey& key, uint64_t payload) {
  const engine::MutexLock lock(mutex_);
  uint64_t& last = records_[key].last_payload;
  if (payload <= last) return Senseless(key, absl::StrCat("names payload ", payload, " after ", last));
  last = payload;
  return absl::OkStatus();
}

void RelayRecords::End(const RelayKey& key) {
  Record ended;
  {
    const engine::MutexLock lock(mutex_);
    const auto found = records_.find(key);
    Record& record = found->second;
    record.over = true;
    if (record.last_payload > 0 && record.tell == nullptr) return;
    ended = std::move(record);
    records_.erase(found);
  }
  if (ended.tell != nullptr) ended.tell(ended.last_payload);
}

void RelayRecords::Settle(const RelayKey& key, std::function<void(uint64_t last_payload)> tell) {
  uint64_t last_payload = 0;
  {
    const engine::MutexLock lock(mutex_);
    const auto found = records_.find(key);
    if (found != records_.end() && !found->second.over && found->second.tell == nullptr) {
      found->second.tell = std::move(tell);
      return;
    }
    if (found != records_.end() && found->second.over) {
      last_payload = found->second.last_payload;
      records_.erase(found);
    }
  }
  tell(last_payload);
}

}  // namespace lossd::rpc
