// Memory that a client and a server on the same host share.
#ifndef LOSSD_REGION_H_
#define LOSSD_REGION_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace lossd {

class Client;

enum class RegionKind {
  kSystem,  // host memory
  kDevice,  // memory of the server's GPU; needs the CUDA driver in this process, and the same GPU
};

// Memory that this process and a server on the same host share, so that hidden states and dX need not travel.
// Session::Compute finds out by itself which of a batch's tensors lie in a region of its client; they must
// begin at a multiple of 16 bytes (in system memory they are sent otherwise) and must not overlap.
//
// Alive during every Compute that uses it. The memory is the server's too while Compute runs: leave hidden
// states alone, and read dX when it has returned. After an error that ends the session, chunks that the
// server had begun may still read and write; they are done when the marks of a new session with the same
// client_key say applied == accepted. A region outlives lost connections, but not its server: after a restart
// Compute says FAILED_PRECONDITION. A forked child keeps the region at the server for as long as it lives,
// too.
class Region {
 public:
  ~Region();  // the server frees the memory once no chunk uses it
  Region(Region&&) noexcept;
  Region& operator=(Region&&) noexcept;

  // Aligned to a page; of kDevice an address in device memory, where the CUDA runtime knows it too.
  void* data() const;
  int64_t size() const;  // at least what was asked for
  RegionKind kind() const;

  // For programs that have no CUDA of their own; blocking. INVALID_ARGUMENT if the bytes are not in the
  // region.
  absl::Status CopyIn(int64_t offset, const void* host, int64_t bytes) const;
  absl::Status CopyOut(int64_t offset, void* host, int64_t bytes) const;

 private:
  friend class Client;
  class Impl;
  explicit Region(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lossd

#endif  // LOSSD_REGION_H_
