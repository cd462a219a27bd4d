// A rank on the CPU; Gloo moves what goes between ranks.
#include <algorithm>
#include <array>
#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "bench/kernels/cpu_step.h"
#include "bench/kernels/measure.h"
#include "bench/kernels/ranks/rank_step.h"
#include "kernels/collectives/gloo_communicator.h"
#include "kernels/exchange.h"
#include "kernels/shard.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::Exchange;
using kernels::LinearCrossEntropyParams;
using kernels::Status;
using kernels::WeightGradient;
using kernels::collectives::Communicator;

std::string Problem(Status status) {
  return status == Status::kOk ? "" : std::string("the step failed: ") + kernels::StatusName(status);
}

// Adds up what a rank waited.
class ExchangeSeconds final : public kernels::ExchangeObserver {
 public:
  double of(Exchange exchange) const { return seconds_[static_cast<size_t>(exchange)]; }

  void OnWaiting(Exchange /*exchange*/) override {}
  void OnWaited(Exchange exchange, double seconds) override {
    seconds_[static_cast<size_t>(exchange)] += seconds;
  }

 private:
  std::array<double, kernels::kExchanges.size()> seconds_{};
};

class CpuRankStep final : public RankStep {
 public:
  CpuRankStep(const KernelCase& kernel_case, const DevicesOptions& options, Communicator& communicator)
      : case_(kernel_case),
        options_(options),
        communicator_(communicator),
        layout_(kernel_case.vocab, options.ranks()),
        shard_(layout_.ShardOf(communicator.rank(), kernels::Segments::kOfRanks, &communicator)),
        whole_(kernel_case) {}

  std::string Create() override {
    if (tile_rows() < 1 || whole_tile_rows() < 1) {
      return "not one row fits a workspace of " + std::to_string(case_.workspace_bytes) + " bytes";
    }
    if (std::string problem = whole_.Create(); !problem.empty()) return problem;
    workspace_ = NewCpuWorkspace(case_.workspace_bytes);
    if (workspace_ == nullptr) return "out of memory for the workspace";
    const int64_t row_bytes = case_.hidden * SizeOf(case_.dtype);
    dx_.resize(whole_.dx().size());
    dw_.resize(static_cast<size_t>(layout_.rows(shard_.rank) * case_.hidden));
    losses_.resize(static_cast<size_t>(case_.tokens));
    const auto* rows = static_cast<const unsigned char*>(whole_.params().hidden_states);
    hidden_states_.assign(rows, rows + case_.tokens * row_bytes);

    params_ = whole_.params();
    params_.shard = &shard_;
    params_.vocab = layout_.rows(shard_.rank);
    params_.weight = static_cast<const unsigned char*>(params_.weight) + shard_.first() * row_bytes;
    params_.hidden_states = hidden_states_.data();
    params_.losses = losses_.data();
    params_.dx = dx_.data();
    params_.dw = dw_.data();
    params_.workspace = workspace_.get();
    return "";
  }

  std::string Connect() override { return ""; }
  void Disconnect() override {}

  std::string Compare(RelativeErrors* difference) override {
    if (const Status status = whole_.Run(WeightGradient::kOverwrite); status != Status::kOk) {
      return Problem(status);
    }
    if (std::string problem = Run(WeightGradient::kOverwrite); !problem.empty()) return problem;
    ErrorNorm dw;
    const size_t first = static_cast<size_t>(shard_.first() * case_.hidden);
    for (size_t i = 0; i < dw_.size(); ++i) dw.Add(dw_[i], whole_.dw()[first + i]);
    *difference = {.dw = dw.Relative()};
    if (!shard_.answers()) return "";
    ErrorNorm loss;
    for (size_t i = 0; i < losses_.size(); ++i) loss.Add(losses_[i], whole_.losses()[i]);
    const std::vector<float> actual = Wide(dx_);
    const std::vector<float> expected = Wide(whole_.dx());
    ErrorNorm dx;
    for (size_t i = 0; i < actual.size(); ++i) dx.Add(actual[i], expected[i]);
    difference->loss = loss.Relative();
    difference->dx = dx.Relative();
    return "";
  }

  std::string TimeWhole(double* milliseconds) override {
    return Time([this] { return Problem(whole_.Run(WeightGradient::kAccumulate)); }, milliseconds);
  }

  std::string TimeShard(double* milliseconds) override {
    return Time([this] { return Run(WeightGradient::kAccumulate); }, milliseconds);
  }

  std::string TimeStages(StageTimes* stages) override {
    ExchangeSeconds seconds;
    double rows = 0;
    std::string problem;
    shard_.observer = &seconds;
    const double all = Milliseconds([&] { problem = Run(WeightGradient::kAccumulate, &rows); });
    shard_.observer = nullptr;
    const double statistics = seconds.of(Exchange::kRowStatistics) * 1e3;
    const double parts = seconds.of(Exchange::kInputGradients) * 1e3;
    *stages = {{"wait for rows", rows},
               {"wait for statistics", statistics},
               {"wait for parts", parts},
               {"computing", all - rows - statistics - parts}};
    return problem;
  }

  int64_t whole_tile_rows() const override {
    return std::min(case_.tokens,
                    kernels::RowsWithin(case_.workspace_bytes, case_.vocab, case_.hidden, case_.dtype));
  }
  int64_t tile_rows() const override {
    return std::min(case_.tokens,
                    kernels::RowsWithin(case_.workspace_bytes, shard_, case_.hidden, case_.dtype, nullptr));
  }
  bool uses_copy_engines() const override { return false; }
  std::string hardware() const override { return CpuStep::Hardware(); }

 private:
  template <class Step>
  std::string Time(const Step& step, double* milliseconds) const {
    std::string problem;
    const double all = Milliseconds([&] {
      for (int64_t i = 0; i < options_.steps && problem.empty(); ++i) problem = step();
    });
    *milliseconds = all / static_cast<double>(options_.steps);
    return problem;
  }

  std::string Run(WeightGradient weight_gradient, double* rows_milliseconds = nullptr) {
    std::string problem;
    const double rows = Milliseconds([&] { problem = SpreadRows(); });
    if (rows_milliseconds != nullptr) *rows_milliseconds = rows;
    if (!problem.empty()) return problem;
    params_.weight_gradient = weight_gradient;
    const Status status = kernels::CpuLinearCrossEntropy(params_, nullptr);
    return status == Status::kRankLost ? communicator_.failure().message() : Problem(status);
  }

  std::string SpreadRows() {
    if (!options_.rows_arrive) return "";
    std::vector<int64_t> from(static_cast<size_t>(options_.ranks()));
    from[static_cast<size_t>(shard_.answering_rank)] = static_cast<int64_t>(hidden_states_.size());
    const kernels::collectives::Result spread =
        communicator_.AllGatherV(hidden_states_.data(), from, hidden_states_.data(), nullptr);
    return spread.ok() ? "" : spread.message();
  }

  std::vector<float> Wide(const std::vector<unsigned char>& values) const {
    std::vector<float> wide(values.size() / static_cast<size_t>(SizeOf(case_.dtype)));
    kernels::Convert(case_.dtype, values.data(), DataType::kFloat32, wide.data(),
                     static_cast<int64_t>(wide.size()));
    return wide;
  }

  const KernelCase& case_;
  const DevicesOptions& options_;
  Communicator& communicator_;
  const kernels::ShardLayout layout_;
  kernels::Shard shard_;
  CpuStep whole_;
  CpuWorkspace workspace_;
  std::vector<unsigned char> hidden_states_;
  std::vector<unsigned char> dx_;
  std::vector<float> dw_;
  std::vector<float> losses_;
  LinearCrossEntropyParams params_;
};

}  // namespace

std::string ConnectCpuRank(int rank, int ranks, kernels::collectives::Rendezvous& rendezvous,
                           std::unique_ptr<Communicator>* communicator) {
#ifdef _OPENMP
  // A rank is its share of the processors, where it computes the whole head too: otherwise threads of one
  // rank would spin in the way of another's.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    omp_set_num_threads(std::max(1, omp_get_num_procs() / ranks));
  }
#endif
  const kernels::collectives::Result connected = kernels::collectives::ConnectGloo(
      {.rank = rank, .size = ranks, .timeout = kLongestRankTurn}, rendezvous, communicator);
  return connected.ok() ? "" : connected.message();
}

std::unique_ptr<RankStep> MakeCpuRankStep(const KernelCase& kernel_case, const DevicesOptions& options,
                                          Communicator& communicator) {
  return std::make_unique<CpuRankStep>(kernel_case, options, communicator);
}

}  // namespace lossd::bench
