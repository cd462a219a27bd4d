// The tensors of a head on their way to the files of a checkpoint and back, some rows at a time.
//
// Belongs to the device thread; no lock.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_STATE_IO_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_STATE_IO_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

// Files of a checkpoint, and keys under which the head would save the same content again.
using FileKeys = std::vector<std::pair<std::string, std::string>>;

// Bytes of the files of such a head, by their names.
using FileSizes = std::map<std::string, int64_t>;
FileSizes SizesOf(const HeadConfig& config, const std::vector<StateTensor>& tensors,
                  const std::vector<std::string>& gradients);

// Files that have the same key have the same content.
struct StateKeys {
  std::string weights;
  std::string optimizer;
  std::string gradients;
};
const std::string& KeyOf(const StateKeys& keys, const StateTensor& tensor);

struct GradientFile {
  std::string name;
  const Gradient* gradient = nullptr;
};

// A head at one moment between two batches.
struct CapturedHead {
  HeadCheckpoint state;                 // its `tensors` and `gradients` are filled in as they are written
  std::vector<GradientFile> gradients;  // those to which anything was added
  StateKeys keys;
};

class HeadStateWriter {
 public:
  // All of these outlive it.
  HeadStateWriter(const HeadConfig* config, HeadBackend* backend, StateSink* sink)
      : config_(*config), backend_(*backend), sink_(*sink) {}

  // Writes every file of `head`, whose state is complete then.
  absl::Status Write(CapturedHead* head);
  // The device's error, if that was the reason: it can no longer be trusted.
  const absl::Status& device() const { return device_; }

 private:
  absl::Status WriteTensor(const StateTensor& tensor, const StateKeys& keys);
  absl::Status WriteGradient(const GradientFile& file, const StateKeys& keys);

  const HeadConfig& config_;
  HeadBackend& backend_;
  StateSink& sink_;
  absl::Status device_;
};

class HeadStateReader {
 public:
  // All of these outlive it.
  HeadStateReader(const HeadConfig* config, HeadBackend* backend, const StateSource* source)
      : config_(*config), backend_(*backend), source_(*source) {}

  const HeadCheckpoint& state() const { return source_.checkpoint(); }
  absl::Status ReadTensors();
  // All rows of a gradient: zero if there is no such file.
  absl::Status ReadGradient(const std::string& name, Gradient* gradient);
  // Adds one gradient to another, and empties it.
  absl::Status Fold(Gradient* from, Gradient* to) { return OfDevice(backend_.Fold(from, to)); }
  // The device's first error: it can no longer be trusted. Ok if the files were the reason.
  const absl::Status& device() const { return device_; }

 private:
  absl::Status OfDevice(absl::Status status);

  const HeadConfig& config_;
  HeadBackend& backend_;
  const StateSource& source_;
  absl::Status device_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_STATE_IO_H_
