// What ranks of a shard tell each other during a step. Every rank makes the same calls in the same order.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_SHARD_EXCHANGE_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_SHARD_EXCHANGE_H_

#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/exchange.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/segment_tree.h"

namespace lossd::kernels::cpu {

// Methods return kOk, or kRankLost if the communicator failed. Where there is one rank they do nothing.
class ShardExchange {
 public:
  explicit ShardExchange(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  bool is_alone() const { return vocabulary_.is_alone(); }

  // `rows` becomes the smallest of all ranks'.
  Status AgreeOnRows(int64_t* rows) const;

  // `all` is [segments, count]: this rank has filled in those of its own segments, and gets the others'.
  template <class Record>
  Status GatherSegments(Record* all, int64_t count) const {
    static_assert(std::is_trivially_copyable_v<Record>);
    PerSegment<int64_t> bytes;
    for (int32_t rank = 0; rank < vocabulary_.shard().ranks(); ++rank) {
      const int64_t segments = vocabulary_.FirstSegment(rank + 1) - vocabulary_.FirstSegment(rank);
      bytes[static_cast<size_t>(rank)] = segments * count * static_cast<int64_t>(sizeof(Record));
    }
    return Gather(all + vocabulary_.first_segment() * count, bytes, all);
  }
  // The same of [ranks, count].
  Status GatherRanks(float* all, int64_t count) const;

  // The rank that answers receives bytes[r] bytes of every rank r, its own 0 included, without gaps. Others
  // send theirs. `what` is for the shard's observer.
  Status SendToAnswering(Exchange what, const void* send, std::span<const int64_t> bytes,
                         void* received) const;

  // Ends the communicator, so that the other ranks do not wait for one whose own step failed.
  void GiveUp() const;

 private:
  Status Gather(const void* own, const PerSegment<int64_t>& bytes, void* all) const;
  size_t ranks() const { return static_cast<size_t>(vocabulary_.shard().ranks()); }

  const Vocabulary& vocabulary_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_SHARD_EXCHANGE_H_
