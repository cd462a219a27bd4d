#include "tests/simulation/sim_communicator.h"

#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "kernels/collectives/rank_order_sum.h"

namespace lossd::simulation {
namespace {

using kernels::collectives::Code;
using kernels::collectives::Communicator;
using kernels::collectives::Operation;
using kernels::collectives::RankOrderSum;
using kernels::collectives::Result;

void Move(const void* from, void* to, int64_t bytes) {
  if (bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
}

class SimCommunicator : public Communicator {
 public:
  SimCommunicator(int rank, SimMeeting* meeting) : Communicator(rank, 2), meeting_(meeting) {}

 private:
  Result Carry(Operation operation, std::span<const Transfer> transfers, void* /*stream*/) override {
    const Transfer& self = transfers[static_cast<size_t>(rank())];
    Move(self.send, self.receive, self.receive_bytes);
    const Transfer& other = transfers[static_cast<size_t>(1 - rank())];
    const Code code =
        meeting_->Meet(rank(), {operation, other.send, other.send_bytes, other.receive, other.receive_bytes});
    return code == Code::kOk ? Result() : Result(code, "the other rank is not there");
  }
  Result GatherOnHost(Operation operation, const void* own, int64_t bytes, void* all, void* stream) override {
    auto* const places = static_cast<std::byte*>(all);
    const std::array<Transfer, 2> transfers = {Transfer{own, bytes, places, bytes},
                                               Transfer{own, bytes, places + bytes, bytes}};
    return Carry(operation, transfers, stream);
  }
  Result Sum(const RankOrderSum& sum, void* /*stream*/) override {
    kernels::collectives::SumInRankOrder(sum);
    return {};
  }
  Result Synchronize(void* /*stream*/) override { return {}; }
  Result CheckStream(void* stream) const override {
    return stream == nullptr ? Result() : Result(Code::kInvalidArgument, "there are no streams");
  }
  void Close() override {}

  SimMeeting* const meeting_;
};

}  // namespace

Code SimMeeting::Meet(int rank, const Part& part) {
  const auto own = static_cast<size_t>(rank);
  if (const Code comes = ranks_[own].comes(); comes != Code::kOk) return comes;
  const std::optional<Part> other = std::exchange(parts_[1 - own], std::nullopt);
  if (other.has_value()) {
    const bool agree = other->operation == part.operation && other->send_bytes == part.receive_bytes &&
                       other->receive_bytes == part.send_bytes;
    outcome_ = agree ? Code::kOk : Code::kMismatch;
    if (!agree) return outcome_;
    Move(other->send, part.receive, part.receive_bytes);
    Move(part.send, other->receive, other->receive_bytes);
    return outcome_;
  }
  parts_[own] = part;
  const Code waited = ranks_[own].waits([this, own] { return !parts_[own].has_value(); });
  if (waited == Code::kOk) return outcome_;
  parts_[own].reset();
  return waited;
}

std::unique_ptr<Communicator> MakeSimCommunicator(int rank, SimMeeting* meeting) {
  return std::make_unique<SimCommunicator>(rank, meeting);
}

}  // namespace lossd::simulation
