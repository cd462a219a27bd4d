#include "kernels/cpu/segments/shard_exchange.h"

#include "kernels/collectives/communicator.h"

namespace lossd::kernels::cpu {
namespace {

Status StatusOf(const collectives::Result& result) { return result.ok() ? Status::kOk : Status::kRankLost; }

}  // namespace

Status ShardExchange::AgreeOnRows(int64_t* rows) const {
  if (is_alone()) return Status::kOk;
  const ExchangeWait wait(vocabulary_.shard().observer, Exchange::kRowStatistics);
  return StatusOf(
      vocabulary_.shard().communicator->AllReduce(collectives::Reduction::kMin, {rows, 1}, nullptr));
}

Status ShardExchange::GatherRanks(float* all, int64_t count) const {
  PerSegment<int64_t> bytes;
  bytes.fill(count * static_cast<int64_t>(sizeof(float)));
  return Gather(all + vocabulary_.shard().rank * count, bytes, all);
}

Status ShardExchange::Gather(const void* own, const PerSegment<int64_t>& bytes, void* all) const {
  if (is_alone()) return Status::kOk;
  const ExchangeWait wait(vocabulary_.shard().observer, Exchange::kRowStatistics);
  return StatusOf(
      vocabulary_.shard().communicator->AllGatherV(own, std::span(bytes).first(ranks()), all, nullptr));
}

Status ShardExchange::SendToAnswering(Exchange what, const void* send, std::span<const int64_t> bytes,
                                      void* received) const {
  if (is_alone()) return Status::kOk;
  const Shard& shard = vocabulary_.shard();
  PerSegment<int64_t> sent{};
  sent[static_cast<size_t>(shard.answering_rank)] = bytes[static_cast<size_t>(shard.rank)];
  const PerSegment<int64_t> nothing{};
  const std::span<const int64_t> expected = shard.answers() ? bytes : std::span<const int64_t>(nothing);
  const ExchangeWait wait(shard.observer, what);
  return StatusOf(shard.communicator->AllToAllV(send, std::span(sent).first(ranks()), received,
                                                expected.first(ranks()), nullptr));
}

void ShardExchange::GiveUp() const {
  if (!is_alone()) vocabulary_.shard().communicator->Abort();
}

}  // namespace lossd::kernels::cpu
