// A head that was put aside in the host's memory: all that it was, and none of the device.
#ifndef LOSSD_SERVER_ENGINE_PARKED_HEAD_H_
#define LOSSD_SERVER_ENGINE_PARKED_HEAD_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/head/parts/head_info.h"
#include "server/engine/head/parts/head_state.h"
#include "server/engine/head/parts/head_state_io.h"
#include "server/engine/memory/host_buffer.h"
#include "server/engine/memory/memory_budget.h"

namespace lossd::engine {

// Written by one thread (Add, then Complete); from Complete on it is constant, and thread-safe.
class ParkedHead : public StateSink, public StateSource {
 public:
  // With room for these files, all of which is taken at once: what is written later cannot fail for want of
  // it. RESOURCE_EXHAUSTED with what is free, or if the system does not give the memory.
  static absl::StatusOr<std::shared_ptr<ParkedHead>> Create(MemoryBudget* budget, const HeadConfig& config,
                                                            const FileSizes& files);

  absl::Status Add(const std::string& name, const std::string& key,
                   absl::FunctionRef<absl::Status(const Append& append)> fill) override;
  void Complete(HeadCheckpoint checkpoint) { checkpoint_ = std::move(checkpoint); }

  // The same of a head that lies elsewhere, as in a checkpoint.
  absl::Status CopyFrom(const StateSource& source);
  // All files into another sink, under no key.
  absl::Status WriteTo(StateSink* sink) const;

  const HeadCheckpoint& checkpoint() const override { return checkpoint_; }
  absl::Status Read(const std::string& name, int64_t offset, std::span<std::byte> out) const override;
  int64_t bytes() const { return TotalBytes(reservation_->plan()); }
  HeadInfo Info(const ChunkLimits& limits) const;

 private:
  std::vector<SessionMarks> WindowMarks() const;
  explicit ParkedHead(std::unique_ptr<MemoryReservation> reservation)
      : reservation_(std::move(reservation)) {}

  const std::unique_ptr<MemoryReservation> reservation_;  // before what it covers, which goes first
  std::map<std::string, HostBuffer> files_;
  HeadCheckpoint checkpoint_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_PARKED_HEAD_H_
