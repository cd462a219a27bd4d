#include "server/engine/schedule/row_streams.h"

namespace lossd::engine {

std::shared_ptr<const void> RowStreams::Take(const std::string& head, int64_t bytes) {
  table_->Add(head, 1, bytes);
  return {static_cast<const void*>(table_.get()),
          [table = table_, head, bytes](const void* /*table*/) { table->Add(head, -1, -bytes); }};
}

RowStreamUsage RowStreams::Total() const {
  const MutexLock lock(table_->mutex);
  return table_->total;
}

RowStreamUsage RowStreams::Of(const std::string& head) const {
  const MutexLock lock(table_->mutex);
  const auto found = table_->heads.find(head);
  return found == table_->heads.end() ? RowStreamUsage() : found->second;
}

std::map<std::string, RowStreamUsage> RowStreams::ByHead() const {
  const MutexLock lock(table_->mutex);
  return table_->heads;
}

void RowStreams::Table::Add(const std::string& head, int64_t streams, int64_t bytes) {
  const MutexLock lock(mutex);
  total.streams += streams;
  total.bytes += bytes;
  RowStreamUsage& usage = heads[head];
  usage.streams += streams;
  usage.bytes += bytes;
  if (usage.streams == 0) heads.erase(head);
}

}  // namespace lossd::engine
