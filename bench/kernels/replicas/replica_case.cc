#include "bench/kernels/replicas/replica_case.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "bench/kernels/command_line.h"
#include "bench/kernels/measure.h"
#include "bench/kernels/ranks/rank_processes.h"
#include "bench/kernels/ranks/rank_step.h"
#include "bench/kernels/replicas/bare_step.h"
#include "bench/kernels/replicas/replica_report.h"
#include "kernels/collectives/communicator.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/cuda/cuda_device.h"
#include "server/engine/device/head_backend.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;
using kernels::DataType;
using kernels::collectives::Communicator;
using kernels::collectives::Rendezvous;

constexpr int64_t kWarmUpRounds = 2;
constexpr int64_t kReplicaWorkspace = int64_t{256} << 20;
constexpr int64_t kSampledRows = 33;
constexpr int64_t kRowsAtOnce = 1024;

// What ends all replicas: one of them has failed amid others that wait for it.
struct ReplicaFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void Need(const std::string& problem) {
  if (!problem.empty()) throw ReplicaFailure(problem);
}
void Need(const absl::Status& status) {
  if (!status.ok()) throw ReplicaFailure(status.ToString());
}
void Need(const kernels::collectives::Result& result) {
  if (!result.ok()) throw ReplicaFailure(result.message());
}
template <class Value>
Value Get(absl::StatusOr<Value> value) {
  Need(value.status());
  return *std::move(value);
}

// Rows of normal numbers, each a part of one table: gigabytes of them would take minutes.
class RowValues {
 public:
  RowValues(int64_t columns, float deviation, uint64_t seed) : columns_(columns), seed_(seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, deviation);
    table_.resize(static_cast<size_t>(kFirsts + columns));
    for (float& value : table_) value = normal(random);
  }
  const float* Row(int64_t row) const {
    return table_.data() + (static_cast<uint64_t>(row) * 2654435761U + seed_ * 40503U) % kFirsts;
  }
  void Fill(int64_t first_row, int64_t rows, float* to) const {
    for (int64_t row = first_row; row < first_row + rows; ++row, to += columns_) {
      std::copy_n(Row(row), columns_, to);
    }
  }

 private:
  static constexpr int64_t kFirsts = 65521;
  const int64_t columns_;
  const uint64_t seed_;
  std::vector<float> table_;
};

engine::StepArguments StepOf(const OptimizerCase& of, int64_t step) {
  const kernels::OptimizerArguments& a = of.arguments;
  const engine::OptimizerKind kind = a.rule == kernels::OptimizerRule::kSgd ? engine::OptimizerKind::kSgd
                                     : a.rule == kernels::OptimizerRule::kAdam
                                         ? engine::OptimizerKind::kAdam
                                         : engine::OptimizerKind::kAdamW;
  return {.learning_rate = a.learning_rate,
          .gradient_scale = a.gradient_scale,
          .optimizer = {.kind = kind,
                        .weight_decay = a.weight_decay,
                        .momentum = a.momentum,
                        .dampening = a.dampening,
                        .nesterov = a.nesterov,
                        .beta1 = a.beta1,
                        .beta2 = a.beta2,
                        .eps = a.eps,
                        .maximize = a.maximize},
          .step = step};
}

class ReplicaProcess {
 public:
  ReplicaProcess(const ReplicaCase& of, int replica, Rendezvous& rendezvous)
      : case_(of), replica_(replica), rendezvous_(rendezvous) {}

  void Create() {
    Say("making random data");
    Connect();
    const OptimizerCase& of = case_.step;
    engine::HeadConfig config{"replicas", of.vocab, of.hidden, of.dtype};
    config.optimizer = StepOf(of, 1).optimizer;
    config.master_weights = of.has_master();
    engine::HeadShard shard = engine::HeadShard::Whole(of.vocab);
    shard.replica = replica_;
    shard.replicas = case_.replicas();
    stepped_ = shard.stepped();
    head_ = Get(device_->CreateShard(config, shard));
    for (const engine::MemoryItem& item : head_->MemoryReport()) times_.reserved_bytes += item.bytes;
    for (uint64_t i = 0; i < static_cast<uint64_t>(case_.replicas()); ++i) {
      gradients_.emplace_back(of.hidden, kGradientDeviation, 100 + i);
    }
    FillHead(config);
    bare_ = cuda_index() < 0 ? MakeCpuBareStep(case_, *host_) : MakeBareStepOnGpu();
    Need(bare_->Create());
  }

  // Bits of rows from all over the head after some steps: sums that are here, and weights.
  void Check() {
    Say("checking");
    const OptimizerCase& of = case_.step;
    const std::vector<int64_t> rows = SampledRows();
    OptimizerSample expected(static_cast<int64_t>(rows.size()) * of.hidden, of);
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t place = i * static_cast<size_t>(of.hidden);
      const float* const weight = weights_.Row(rows[i]);
      if (of.has_master()) std::copy_n(weight, of.hidden, &expected.master[place]);
      kernels::Convert(DataType::kFloat32, weight, of.dtype,
                       &expected.weight[place * static_cast<size_t>(SizeOf(of.dtype))], of.hidden);
      const std::vector<float> sum = SumOfRow(rows[i]);
      std::copy(sum.begin(), sum.end(), &expected.gradient[place]);
    }
    for (int64_t step = 1; step <= kCheckedStep; ++step) {
      (void)TimePhases(step);
      expected.Apply(of, step);
    }
    for (size_t i = 0; i < rows.size(); ++i) CheckRow(rows[i], i, expected);
    times_.checked = static_cast<int64_t>(rows.size()) * of.hidden;
  }

  // Who goes first changes: devices slow down as they heat up.
  void Time() {
    for (int64_t i = -kWarmUpRounds; i < case_.step.repetitions; ++i) {
      Say(i < 0 ? "warming up"
                : "timing, round " + std::to_string(i + 1) + " of " + std::to_string(case_.step.repetitions));
      ReplicaTimes::Round round;
      if (i % 2 == 0) round = TimePhases(kCheckedStep);
      const auto timed = [this](auto work) {
        Meet();
        return Milliseconds([&] { Need(work()); });
      };
      const double bare[] = {timed([this] { return bare_->ReduceScatter(); }),
                             timed([this] { return bare_->Step(); }),
                             timed([this] { return bare_->AllGather(); })};
      if (i % 2 != 0) round = TimePhases(kCheckedStep);
      std::copy(std::begin(bare), std::end(bare), round.operations);
      if (i >= 0) times_.rounds.push_back(round);
    }
  }

  std::vector<std::string> Gather() {
    std::vector<std::string> all;
    Need(rendezvous_.AllGather(ToJson(times_).dump(), kLongestRankTurn, &all));
    return all;
  }
  // What others use is let go of when all have come so far.
  void Meet() { Need(host_->Barrier(nullptr)); }

 private:
  int cuda_index() const { return CudaIndex(case_.devices[static_cast<size_t>(replica_)]); }
  const engine::ReplicaCommunicators& others() const { return connection_->communicators(); }
  void Say(const std::string& what) const {
    if (replica_ == 0) std::fprintf(stderr, "%s\n", what.c_str());
  }

  void Connect() {
    const int index = cuda_index();
    Need(ConnectCpuRank(replica_, case_.replicas(), rendezvous_, &host_));
    if (index < 0) {
      device_ = Get(engine::CreateCpuDevice(kReplicaWorkspace));
    } else {
      engine::CudaOptions options;
      options.chunk_limits = {.max_chunk_bytes = int64_t{4} << 20, .max_chunk_tokens = 4096};
      device_ = Get(engine::CreateCudaDevice(index, options));
    }
    times_.hardware = device_->description();
    connection_ = Get(device_->ConnectReplicas({.place = {replica_, case_.replicas()},
                                                .timeout = kLongestRankTurn,
                                                .connect_timeout = kLongestRankTurn},
                                               rendezvous_));
  }

  std::unique_ptr<BareStep> MakeBareStepOnGpu() {
#ifdef LOSSD_CUDA
    return MakeCudaBareStep(case_, replica_, rendezvous_);
#else
    throw ReplicaFailure("this lossd-bench was built without CUDA (no CUDA toolkit was found)");
#endif
  }

  void FillHead(const engine::HeadConfig& config) {
    const int64_t hidden = config.hidden_size;
    const int64_t rows = config.vocab_size;
    engine::WeightBuffers staged{
        .weights = Get(engine::HostBuffer::Create(config.staged_bytes(), engine::Commit::kNow))};
    std::vector<float> some(static_cast<size_t>(kRowsAtOnce * hidden));
    for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - first);
      weights_.Fill(first, count, some.data());
      kernels::Convert(DataType::kFloat32, some.data(), config.master_type(),
                       staged.weights.data() + first * hidden * SizeOf(config.master_type()), count * hidden);
    }
    Need(head_->PublishWeights(std::move(staged)));
    const RowValues& own = gradients_[static_cast<size_t>(replica_)];
    for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - first);
      own.Fill(first, count, some.data());
      Need(head_->WriteGradient(nullptr, first, count, some.data(), nullptr));
    }
  }

  ReplicaTimes::Round TimePhases(int64_t step) {
    ReplicaTimes::Round round;
    const engine::StepArguments arguments = StepOf(case_.step, step);
    Meet();
    round.whole = Milliseconds([&] {
      round.phases[0] = Milliseconds([&] { Need(head_->SumSlices(nullptr, others())); });
      round.phases[1] =
          Milliseconds([&] { Need(head_->TallySum(arguments.gradient_scale, others()).status()); });
      round.phases[2] = Milliseconds([&] {
        Need(head_->StepSlices(arguments));
        Need(head_->GatherSlices(others()));
      });
    });
    return round;
  }

  // The first and the last, and others between them.
  std::vector<int64_t> SampledRows() const {
    const int64_t count = std::min(kSampledRows, case_.step.vocab);
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < count; ++i) {
      rows.push_back(count == 1 ? 0 : i * (case_.step.vocab - 1) / (count - 1));
    }
    return rows;
  }
  std::vector<float> SumOfRow(int64_t row) const {
    std::vector<float> sum(static_cast<size_t>(case_.step.hidden));
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const float* const more = gradients_[i].Row(row);
      for (size_t k = 0; k < sum.size(); ++k) sum[k] = i == 0 ? more[k] : sum[k] + more[k];
    }
    return sum;
  }
  void CheckRow(int64_t row, size_t sample, const OptimizerSample& expected) {
    const auto hidden = static_cast<size_t>(case_.step.hidden);
    if (stepped_.Has({row, 1})) {
      std::vector<float> sum(hidden);
      Need(head_->ReadSum(row, 1, sum.data()));
      if (std::memcmp(sum.data(), &expected.gradient[sample * hidden], hidden * sizeof(float)) != 0) {
        throw ReplicaFailure("the sum of row " + std::to_string(row) + " is not that of the gradients");
      }
    }
    std::vector<char> weight(hidden * static_cast<size_t>(SizeOf(case_.step.dtype)));
    Need(head_->ReadWeightRows(row, 1, case_.step.dtype, weight.data()));
    if (std::memcmp(weight.data(), &expected.weight[sample * weight.size()], weight.size()) != 0) {
      throw ReplicaFailure("the weights of row " + std::to_string(row) + " are not those of one device");
    }
  }

  const ReplicaCase& case_;
  const int replica_;
  Rendezvous& rendezvous_;
  std::unique_ptr<Communicator> host_;
  std::unique_ptr<engine::Device> device_;
  std::shared_ptr<engine::ReplicaConnection> connection_;
  std::unique_ptr<engine::HeadBackend> head_;
  kernels::RowSpan stepped_;
  std::unique_ptr<BareStep> bare_;
  RowValues weights_{case_.step.hidden, kWeightDeviation, 1};
  std::vector<RowValues> gradients_;  // by replica
  ReplicaTimes times_;
};

}  // namespace

bool RunReplicaCase(const ReplicaCase& of, const std::function<void(const Json&)>& print) {
  return RunRanks(of.replicas(), [&](int number, Rendezvous& rendezvous) {
    try {
      ReplicaProcess replica(of, number, rendezvous);
      replica.Create();
      replica.Check();
      replica.Time();
      const std::vector<std::string> all = replica.Gather();
      if (number == 0) print(Collect(of, all));
      replica.Meet();
      return true;
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "replica %d (%s): %s\n", number, of.devices[static_cast<size_t>(number)].c_str(),
                   failure.what());
      return false;
    }
  });
}

}  // namespace lossd::bench
