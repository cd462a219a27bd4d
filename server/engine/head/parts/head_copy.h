// Copies of heads, and blends of their weights, on one device.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_COPY_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_COPY_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"

namespace lossd::engine {

// Gets the version that a write, a copy or a blend has made.
using CommitCallback = std::function<void(absl::StatusOr<uint64_t>)>;

// A head that begins as another one is.
struct HeadCopy {
  std::string source = {};
  std::string name = {};
  // A frozen copy has weights alone; another one goes on as the source would, with its optimizer's state.
  enum class Training { kAsSource, kFrozen };
  Training training = Training::kAsSource;
  // An fp32 master of 16-bit weights, also where the source has none: what is blended into the copy in small
  // parts is lost to rounding without one. kAsTrained: one that is trained has what the source has, a frozen
  // one none.
  enum class Master { kAsTrained, kKept };
  Master master = Master::kAsTrained;
  uint64_t source_version = 0;  // what the weights must be of; 0: any
  std::string copy_id = {};     // not empty
};

// How the weights of one head go into another one's.
struct BlendRequest {
  std::string source = {};      // the other head
  double decay = 0;             // in [0, 1]: what is kept
  std::string blend_id;         // not empty
  uint64_t source_version = 0;  // what the weights must be of; 0: any
  uint64_t target_version = 0;
};

// Ids as WeightStore keeps them: a write, a copy and a blend of one id are three calls.
inline std::string NoteOfCopy(const std::string& copy_id) { return "copy:" + copy_id; }
inline std::string NoteOfBlend(const std::string& blend_id) { return "blend:" + blend_id; }

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_COPY_H_
