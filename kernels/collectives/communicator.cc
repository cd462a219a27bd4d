#include "kernels/collectives/communicator.h"

#include <cmath>
#include <type_traits>

namespace lossd::kernels::collectives {
namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

template <class Value>
Value Combine(Reduction reduction, Value a, Value b) {
  if constexpr (std::is_floating_point_v<Value>) {
    if (std::isnan(a) || std::isnan(b)) return a + b;
  }
  switch (reduction) {
    case Reduction::kSum:
      if constexpr (std::is_integral_v<Value>) {
        return static_cast<Value>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
      } else {
        return a + b;
      }
    case Reduction::kMin:
      return b < a ? b : a;
    case Reduction::kMax:
      return a < b ? b : a;
  }
  return a;
}

const void* Offset(const void* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<const char*>(pointer) + bytes;
}
void* Offset(void* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<char*>(pointer) + bytes;
}

}  // namespace

const char* NameOf(Operation operation) {
  switch (operation) {
    case Operation::kConnect:
      return "connecting ranks";
    case Operation::kAllGatherV:
      return "all-gather-v";
    case Operation::kAllToAllV:
      return "all-to-all-v";
    case Operation::kReduceScatterV:
      return "reduce-scatter-v";
    case Operation::kExchange:
      return "exchange";
    case Operation::kAllReduce:
      return "all-reduce";
    case Operation::kBarrier:
      return "barrier";
    case Operation::kWait:
      return "waiting for a stream";
  }
  return "an unknown operation";
}

Result Communicator::AllGatherV(const void* own, std::span<const int64_t> bytes, void* all, void* stream) {
  constexpr Operation kOperation = Operation::kAllGatherV;
  LOSSD_COLLECTIVE_TRY(Begin(kOperation, stream));
  LOSSD_COLLECTIVE_TRY(CheckCounts(kOperation, bytes));
  std::vector<Transfer> transfers;
  int64_t place = 0;
  for (const int64_t of_rank : bytes) {
    transfers.push_back({own, bytes[static_cast<size_t>(rank_)], Offset(all, place), of_rank});
    place += of_rank;
  }
  return Ended(kOperation, Carry(kOperation, transfers, stream));
}

Result Communicator::AllToAllV(const void* send, std::span<const int64_t> send_bytes, void* received,
                               std::span<const int64_t> receive_bytes, void* stream) {
  constexpr Operation kOperation = Operation::kAllToAllV;
  LOSSD_COLLECTIVE_TRY(Begin(kOperation, stream));
  LOSSD_COLLECTIVE_TRY(CheckCounts(kOperation, send_bytes));
  LOSSD_COLLECTIVE_TRY(CheckCounts(kOperation, receive_bytes));
  std::vector<Transfer> transfers;
  int64_t send_place = 0;
  int64_t receive_place = 0;
  for (size_t peer = 0; peer < send_bytes.size(); ++peer) {
    transfers.push_back(
        {Offset(send, send_place), send_bytes[peer], Offset(received, receive_place), receive_bytes[peer]});
    send_place += send_bytes[peer];
    receive_place += receive_bytes[peer];
  }
  return CarryAll(kOperation, transfers, stream);
}

Result Communicator::ReduceScatterV(std::span<const float* const> parts, std::span<const int64_t> counts,
                                    float* sum, void* scratch, void* stream) {
  LOSSD_COLLECTIVE_TRY(ScatterV(parts, counts, scratch, stream));
  const auto self = static_cast<size_t>(rank_);
  return AddScattered(parts[self], counts[self], scratch, sum, stream);
}

Result Communicator::ScatterV(std::span<const float* const> parts, std::span<const int64_t> counts,
                              void* scratch, void* stream) {
  constexpr Operation kOperation = Operation::kReduceScatterV;
  LOSSD_COLLECTIVE_TRY(Begin(kOperation, stream));
  LOSSD_COLLECTIVE_TRY(CheckCounts(kOperation, counts));
  if (parts.size() != counts.size()) {
    return Invalid(kOperation, std::to_string(parts.size()) + " parts; it takes one a rank");
  }
  const auto self = static_cast<size_t>(rank_);
  const int64_t own_bytes = counts[self] * kFloatBytes;
  std::vector<Transfer> transfers;
  int64_t receive_place = 0;
  for (size_t peer = 0; peer < counts.size(); ++peer) {
    // What this rank gives itself is read where it lies.
    if (peer == self) {
      transfers.emplace_back();
      continue;
    }
    transfers.push_back({parts[peer], counts[peer] * kFloatBytes, Offset(scratch, receive_place), own_bytes});
    receive_place += own_bytes;
  }
  return CarryAll(kOperation, transfers, stream);
}

Result Communicator::AddScattered(const float* part, int64_t count, const void* scratch, float* sum,
                                  void* stream) {
  constexpr Operation kOperation = Operation::kReduceScatterV;
  LOSSD_COLLECTIVE_TRY(Begin(kOperation, stream));
  const RankOrderSum ordered{.own = part,
                             .received = static_cast<const float*>(scratch),
                             .rank = rank_,
                             .ranks = size_,
                             .count = count,
                             .sum = sum};
  return Ended(kOperation, Sum(ordered, stream));
}

int64_t Communicator::ReduceScatterScratchBytes(std::span<const int64_t> counts) const {
  return counts[static_cast<size_t>(rank_)] * kFloatBytes * (size_ - 1);
}

Result Communicator::Exchange(std::span<const Transfer> transfers, void* stream) {
  constexpr Operation kOperation = Operation::kExchange;
  LOSSD_COLLECTIVE_TRY(Begin(kOperation, stream));
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  for (const Transfer& transfer : transfers) {
    sent.push_back(transfer.send_bytes);
    received.push_back(transfer.receive_bytes);
  }
  LOSSD_COLLECTIVE_TRY(CheckCounts(kOperation, sent));
  LOSSD_COLLECTIVE_TRY(CheckCounts(kOperation, received));
  return CarryAll(kOperation, transfers, stream);
}

Result Communicator::CarryAll(Operation operation, std::span<const Transfer> transfers, void* stream) {
  const Transfer& self = transfers[static_cast<size_t>(rank_)];
  if (self.send_bytes != self.receive_bytes) {
    return Invalid(operation, "what it sends itself is not what it receives from itself");
  }
  return Ended(operation, Carry(operation, transfers, stream));
}

Result Communicator::AllReduce(Reduction reduction, std::span<double> values, void* stream) {
  return Reduce(reduction, values, stream);
}

Result Communicator::AllReduce(Reduction reduction, std::span<int64_t> values, void* stream) {
  return Reduce(reduction, values, stream);
}

template <class Value>
Result Communicator::Reduce(Reduction reduction, std::span<Value> values, void* stream) {
  constexpr Operation kOperation = Operation::kAllReduce;
  LOSSD_COLLECTIVE_TRY(Begin(kOperation, stream));
  if (values.size() > static_cast<size_t>(kMostValues)) {
    return Invalid(kOperation, std::to_string(values.size()) + " values; " + std::to_string(kMostValues) +
                                   " are the most");
  }
  std::vector<Value> all(values.size() * static_cast<size_t>(size_));
  LOSSD_COLLECTIVE_TRY(
      Ended(kOperation, GatherOnHost(kOperation, values.data(), static_cast<int64_t>(values.size_bytes()),
                                     all.data(), stream)));
  for (size_t i = 0; i < values.size(); ++i) {
    Value total = all[i];
    for (size_t place = values.size() + i; place < all.size(); place += values.size()) {
      total = Combine(reduction, total, all[place]);
    }
    values[i] = total;
  }
  return {};
}

Result Communicator::Barrier(void* stream) {
  constexpr Operation kOperation = Operation::kBarrier;
  LOSSD_COLLECTIVE_TRY(Begin(kOperation, stream));
  const int64_t own = rank_;
  std::vector<int64_t> all(static_cast<size_t>(size_));
  return Ended(kOperation, GatherOnHost(kOperation, &own, sizeof(own), all.data(), stream));
}

Result Communicator::Wait(void* stream) {
  LOSSD_COLLECTIVE_TRY(Begin(Operation::kWait, stream));
  return Ended(Operation::kWait, Synchronize(stream));
}

void Communicator::Abort() {
  aborted_.store(true);
  Close();
}

Result Communicator::Begin(Operation operation, void* stream) const {
  if (!failure_.ok()) {
    return {failure_.code(),
            Prefix(operation) + "the communicator has failed before (" + failure_.message() + ")"};
  }
  if (aborted()) return {Code::kAborted, Prefix(operation) + "the communicator was aborted"};
  Result result = CheckStream(stream);
  return result.ok() ? result : Invalid(operation, result.message());
}

Result Communicator::Invalid(Operation operation, const std::string& why) const {
  return {Code::kInvalidArgument, Prefix(operation) + why};
}

Result Communicator::Ended(Operation operation, Result result) {
  if (result.ok()) return result;
  failure_ = aborted() ? Result(Code::kAborted, Prefix(operation) + "the communicator was aborted")
                       : Result(result.code(), Prefix(operation) + result.message());
  Close();
  return failure_;
}

Result Communicator::CheckCounts(Operation operation, std::span<const int64_t> counts) const {
  if (counts.size() != static_cast<size_t>(size_)) {
    return Invalid(operation, std::to_string(counts.size()) + " counts; it takes one a rank");
  }
  for (const int64_t count : counts) {
    if (count < 0) return Invalid(operation, "the count " + std::to_string(count) + " is negative");
  }
  return {};
}

std::string Communicator::Prefix(Operation operation) const {
  return std::string(NameOf(operation)) + ": rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
         ": ";
}

}  // namespace lossd::kernels::collectives
