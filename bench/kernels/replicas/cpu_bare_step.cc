// By Gloo, as replicas on CPUs.
#include <vector>

#include "bench/kernels/replicas/bare_step.h"

namespace lossd::bench {
namespace {

using kernels::SliceLayout;
using kernels::collectives::Communicator;

std::string SaidBy(const kernels::collectives::Result& result) { return result.ok() ? "" : result.message(); }

class CpuBareStep final : public BareStep {
 public:
  CpuBareStep(const ReplicaCase& of, Communicator& host)
      : case_(of), host_(host), layout_(of.step.vocab, of.replicas()) {}

  std::string Create() override {
    const int64_t columns = case_.step.hidden;
    gradient_.assign(static_cast<size_t>(case_.step.elements()), 1e-3f);
    weight_.resize(gradient_.size() * static_cast<size_t>(SizeOf(case_.step.dtype)));
    for (int32_t slice = 0; slice < layout_.replicas(); ++slice) {
      const kernels::RowSpan rows = layout_.Slice(slice);
      parts_.push_back(gradient_.data() + rows.first * columns);
      counts_.push_back(rows.count * columns);
      bytes_.push_back(rows.count * columns * SizeOf(case_.step.dtype));
    }
    sum_.resize(static_cast<size_t>(counts_[static_cast<size_t>(host_.rank())]));
    scratch_.resize(static_cast<size_t>(host_.ReduceScatterScratchBytes(counts_)));
    const auto stepped = static_cast<size_t>(SteppedRowsOf(case_, host_.rank()) * columns);
    if (case_.step.has_master()) master_.resize(stepped);
    first_.resize(stepped);
    second_.resize(stepped);
    return "";
  }
  std::string ReduceScatter() override {
    return SaidBy(host_.ReduceScatterV(parts_, counts_, sum_.data(), scratch_.data(), nullptr));
  }
  std::string Step() override {
    kernels::CpuApplyOptimizer({.count = static_cast<int64_t>(first_.size()),
                                .gradient = gradient_.data(),
                                .weight_type = case_.step.dtype,
                                .weight = weight_.data(),
                                .master = master_.empty() ? nullptr : master_.data(),
                                .first_moment = first_.data(),
                                .second_moment = second_.data()},
                               CoefficientsAt(case_.step, kCheckedStep));
    return "";
  }
  std::string AllGather() override {
    int64_t own = 0;
    for (int rank = 0; rank < host_.rank(); ++rank) own += bytes_[static_cast<size_t>(rank)];
    return SaidBy(host_.AllGatherV(weight_.data() + own, bytes_, weight_.data(), nullptr));
  }

 private:
  const ReplicaCase& case_;
  Communicator& host_;
  const SliceLayout layout_;
  std::vector<float> gradient_, sum_, master_, first_, second_;
  std::vector<char> weight_, scratch_;
  std::vector<const float*> parts_;
  std::vector<int64_t> counts_;  // by slice
  std::vector<int64_t> bytes_;   // the same, of weights
};

}  // namespace

std::unique_ptr<BareStep> MakeCpuBareStep(const ReplicaCase& of, Communicator& host) {
  return std::make_unique<CpuBareStep>(of, host);
}

}  // namespace lossd::bench
