// Streams of rows under way (ReadWeights, ReadGradient), and what they may hold until their clients have read
// it.
#ifndef LOSSD_SERVER_ENGINE_SCHEDULE_ROW_STREAMS_H_
#define LOSSD_SERVER_ENGINE_SCHEDULE_ROW_STREAMS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"

namespace lossd::engine {

struct RowStreamUsage {
  int64_t streams = 0;
  int64_t bytes = 0;  // that they may hold together
};

// Thread-safe. What was taken may be given back after this object has gone.
class RowStreams {
 public:
  // One more stream of this head, until the answer is dropped.
  std::shared_ptr<const void> Take(const std::string& head, int64_t bytes);

  RowStreamUsage Total() const;
  RowStreamUsage Of(const std::string& head) const;
  std::map<std::string, RowStreamUsage> ByHead() const;  // heads without a stream are left out

 private:
  struct Table {
    void Add(const std::string& head, int64_t streams, int64_t bytes);

    Mutex mutex;
    RowStreamUsage total ABSL_GUARDED_BY(mutex);
    std::map<std::string, RowStreamUsage> heads ABSL_GUARDED_BY(mutex);
  };

  const std::shared_ptr<Table> table_ = std::make_shared<Table>();
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SCHEDULE_ROW_STREAMS_H_
