// Weights in and out by rows: what lossd::Head takes and gives. Part of lossd/client.h.
//
// Ranks that hold a weight in fp32 shards write it like this; none of them ever has the whole:
//
//   auto write = head.BeginWrite({.write_key = "step 100"});   // every rank, with the same key
//   write->WriteRows(first_row, rows, lossd::DataType::kFloat32, shard);
//   barrier();
//   auto version = write->Commit();                            // every rank, or one of them
//   head.ReadRows(first_row, rows, lossd::DataType::kFloat32, shard, {.weight_version = *version});
#ifndef LOSSD_WEIGHTS_H_
#define LOSSD_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lossd/loss.h"

namespace lossd {

class Head;

// Called now and then during a transfer, from the thread that made the call, with 0 <= done <= total bytes.
using Progress = std::function<void(int64_t done, int64_t total)>;

struct WeightWriteOptions {
  // Those that give the same key write one version together, each its own rows. Another version needs another
  // key: the number of the step, for instance. 1 to 256 bytes.
  std::string write_key;
  // Drops an unfinished write of another key, which somebody who went away may have left. If false that is
  // FAILED_PRECONDITION.
  bool replace = true;
};

// A new version of a head's weights on its way in, or this process's part of it. Nobody sees any of it before
// it is committed. Dropping the handle changes nothing at the server: a process that was restarted begins
// again with the same key and goes on. Thread-safe.
class WeightWrite {
 public:
  ~WeightWrite();
  WeightWrite(WeightWrite&&) noexcept;
  WeightWrite& operator=(WeightWrite&&) noexcept;

  // Sends rows [first_row, first_row + rows) of the weight, `weights` being [rows, H] of `type`, and `bias`
  // [rows], each finite, if the head has one. They are rounded to the head's dtype before they are sent, or
  // if the server keeps an fp32 master go as fp32. Rows that were sent before are overwritten. It needs
  // memory for one message (ClientOptions::transfer_bytes), not for the shard. NOT_FOUND if the write was
  // committed, or replaced by one of another key.
  absl::Status WriteRows(int64_t first_row, int64_t rows, DataType type, const void* weights,
                         std::span<const float> bias = {}, const Progress& progress = {}) const;

  // Publishes the version, and returns it. FAILED_PRECONDITION, naming the first that is missing, unless
  // every row of the head has arrived. Every writer may call it, as often as it likes: as long as no other
  // write was committed after this one, all get the same answer.
  absl::StatusOr<uint64_t> Commit() const;

  const std::string& id() const;

 private:
  friend class Head;
  class Impl;
  explicit WeightWrite(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct ReadRowsOptions {
  // What the weights must be of, for readers that each read their own rows; FAILED_PRECONDITION if they are
  // of another version. 0: whatever they are of.
  uint64_t weight_version = 0;
  std::span<float> bias = {};  // [rows] of a head with a bias, otherwise empty
  Progress progress = {};
};

struct LoadWeightsOptions {
  std::string path;              // below the server's folder: a file, or a folder with an index
  std::string tensor = {};       // empty: "lm_head.weight", or else the only one of the head's shape
  std::string bias_tensor = {};  // empty: "lm_head.bias"; of a head with a bias
  // In rows here, as the server tells them; asks for them now and then.
  Progress progress = {};
};

struct LoadedWeights {
  uint64_t weight_version = 0;
  std::string tensor;  // the one that was taken
};

}  // namespace lossd

#endif  // LOSSD_WEIGHTS_H_
