// What the replicas of a head do together: each steps a slice by the sum of all gradients, and all of them
// have the weights of one server that was given that sum.
#include "kernels/slices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/optimizer/optimizer_fixture.h"
#include "tests/conformance/replicas/replicas_under_test.h"

namespace lossd::engine::testing::slices_test {
namespace {

using kernels::OptimizerArguments;
using kernels::OptimizerRule;
using kernels::RowSpan;
using kernels::SizeOf;
using kernels::testing::OptimizersUnderTest;
using kernels::testing::SameBits;
using ::testing::HasSubstr;

constexpr OptimizerArguments kAdamW = {
    .rule = OptimizerRule::kAdamW, .learning_rate = 1e-2, .gradient_scale = 0.5, .weight_decay = 0.1};

// Rows on their way between replicas, and what else does not grow with the head.
constexpr int64_t kMostOnTheWay = 140'000'000;

// Entries of these rows of a matrix of `columns`.
template <class Value>
std::vector<Value> RowsIn(const std::vector<Value>& matrix, int64_t columns, const RowSpan& rows) {
  return {matrix.begin() + rows.first * columns, matrix.begin() + rows.end() * columns};
}

// A head at `replicas` servers, each of which has a device of its own.
class Replicas {
 public:
  struct One {
    std::unique_ptr<Device> device;
    HeadShard shard;
    std::unique_ptr<HeadUnderTest> head;

    RowSpan stepped() const { return shard.stepped(); }
    HeadBackend& backend() { return head->backend(); }
  };

  Replicas(const DeviceUnderTest& which, int32_t replicas, const HeadConfig& config) : which_(which) {
    HeadShard shard = HeadShard::Whole(config.vocab_size);
    shard.replicas = replicas;
    for (shard.replica = 0; shard.replica < replicas; ++shard.replica) {
      std::unique_ptr<Device> device = *CreateReplica(which, shard.replica);
      auto head = std::make_unique<HeadUnderTest>(device.get(), config, shard);
      ones_.push_back({std::move(device), shard, std::move(head)});
    }
  }

  int32_t size() const { return static_cast<int32_t>(ones_.size()); }
  One& at(int32_t replica) { return ones_[static_cast<size_t>(replica)]; }

  // Runs body at all of them at the same time.
  void Together(const ReplicaBody& body) {
    std::vector<Device*> devices;
    for (const One& one : ones_) devices.push_back(one.device.get());
    RunReplicas(which_, devices, body);
  }
  void SumAll() {
    Together([this](int32_t replica, const ReplicaConnections& others) {
      const absl::Status summed = at(replica).backend().SumSlices(nullptr, others.communicators);
      EXPECT_TRUE(summed.ok()) << summed;
    });
  }
  void StepAll(const StepArguments& arguments) {
    for (One& one : ones_) {
      const absl::Status stepped = one.backend().StepSlices(arguments);
      EXPECT_TRUE(stepped.ok()) << stepped;
    }
  }
  void GatherAll() {
    Together([this](int32_t replica, const ReplicaConnections& others) {
      const absl::Status gathered = at(replica).backend().GatherSlices(others.communicators);
      EXPECT_TRUE(gathered.ok()) << gathered;
    });
  }

 private:
  const DeviceUnderTest which_;
  std::vector<One> ones_;
};

class Slices : public OptimizerTest {
 protected:
  static constexpr int64_t kSteps = 3;

  void SetUp() override {
    OptimizerTest::SetUp();
    if (!IsSkipped() && MostReplicas(GetParam().device) < 2) GTEST_SKIP() << "there are no two devices";
  }
  // `wanted`, or as many as there can be.
  int32_t Most(int32_t wanted) const { return std::min(wanted, MostReplicas(GetParam().device)); }
  Replicas Make(int32_t replicas, const HeadConfig& config) const {
    return {GetParam().device, replicas, config};
  }

  static void PublishAll(Replicas& replicas, const HeadValues& values) {
    for (int32_t replica = 0; replica < replicas.size(); ++replica) {
      Publish(*replicas.at(replica).head, values);
    }
  }

  // One for each replica.
  static std::vector<GradientValues> RandomGradients(const HeadConfig& config, int32_t replicas,
                                                     uint64_t seed) {
    std::vector<GradientValues> gradients;
    for (int32_t i = 0; i < replicas; ++i) {
      gradients.push_back(RandomGradient(config, seed + 10 * static_cast<uint64_t>(i)));
    }
    return gradients;
  }
  // In their order.
  static GradientValues SumOf(const std::vector<GradientValues>& gradients) {
    GradientValues sum = gradients.front();
    for (size_t i = 1; i < gradients.size(); ++i) {
      for (size_t j = 0; j < sum.dw.size(); ++j) sum.dw[j] += gradients[i].dw[j];
      for (size_t j = 0; j < sum.db.size(); ++j) sum.db[j] += gradients[i].db[j];
    }
    return sum;
  }
  // Writes them, and tells their sum.
  static GradientValues WriteAll(Replicas& replicas, const std::vector<GradientValues>& gradients) {
    for (int32_t replica = 0; replica < replicas.size(); ++replica) {
      Write(*replicas.at(replica).head, gradients[static_cast<size_t>(replica)]);
    }
    return SumOf(gradients);
  }

  static GradientValues NoGradient(const HeadConfig& config) {
    GradientValues values{std::vector<float>(static_cast<size_t>(config.elements())), {}};
    if (config.bias) values.db.resize(static_cast<size_t>(config.vocab_size));
    return values;
  }

  // Small numbers from 0 on, as moments are.
  static std::vector<float> Squares(int64_t count) {
    std::vector<float> squares = kernels::testing::NormalFloats(count, 0.1, 3);
    for (float& square : squares) square *= square;
    return squares;
  }

  // A head that gives a replica's part of the sum of dW, and no more: one without a bias.
  static std::unique_ptr<HeadUnderTest> MatrixAlone(Replicas::One& one, const GradientValues& gradient) {
    HeadConfig config = one.head->config();
    config.bias = false;
    auto head = std::make_unique<HeadUnderTest>(one.device.get(), config, one.shard);
    Write(*head, {gradient.dw, {}});
    return head;
  }

  // What it steps of these values, as a checkpoint gives it back.
  static void RestoreTo(const HeadValues& values, Replicas::One& one) {
    const HeadConfig& config = one.head->config();
    const RowSpan rows = one.stepped();
    const auto write = [&](const std::string& name, const void* whole, int64_t row_bytes) {
      const auto* from = static_cast<const unsigned char*>(whole) + rows.first * row_bytes;
      const absl::Status written = one.backend().WriteState(name, rows.first, rows.count, from);
      EXPECT_TRUE(written.ok()) << written;
    };
    if (config.master_weights) {
      write("master_weight", values.master.data(), config.hidden_size * 4);
    } else {
      write("weight", values.weight.data(), config.hidden_size * SizeOf(config.weight_type));
    }
    write("bias", values.bias.data(), 4);
    write("exp_avg", values.first.data(), config.hidden_size * 4);
    write("exp_avg_sq", values.second.data(), config.hidden_size * 4);
    write("bias.exp_avg", values.bias_first.data(), 4);
    write("bias.exp_avg_sq", values.bias_second.data(), 4);
    EXPECT_TRUE(one.backend().RestoreState().ok());
  }

  // One replica's part of a whole step; tells what the sum adds up to.
  static GradientStats StepTogether(HeadUnderTest& head, const OptimizerArguments& step,
                                    const ReplicaCommunicators& others) {
    absl::Status status = head.backend().SumSlices(nullptr, others);
    const absl::StatusOr<GradientTallies> tallies = head.backend().TallySum(step.gradient_scale, others);
    status.Update(tallies.status());
    status.Update(head.backend().StepSlices(ArgumentsOf(step)));
    status.Update(head.backend().GatherSlices(others));
    EXPECT_TRUE(status.ok()) << status;
    return StatsOf(tallies.value_or(GradientTallies{}));
  }

  // Rows [rows) of one tensor of a replica's state.
  static std::vector<float> StateRows(Replicas::One& one, const std::string& name, int64_t columns,
                                      const RowSpan& rows) {
    std::vector<float> values(static_cast<size_t>(rows.count * columns));
    const absl::Status read = one.backend().ReadState(name, rows.first, rows.count, values.data());
    EXPECT_TRUE(read.ok()) << read;
    return values;
  }

  // That a replica has all weights, and of master and moments the rows that it steps, bit for bit.
  static void ExpectValues(Replicas::One& one, const HeadValues& values) {
    const HeadConfig& config = one.head->config();
    EXPECT_TRUE(one.head->Weights(config.weight_type, 0, config.vocab_size) == values.weight) << "weights";
    if (config.bias) {
      EXPECT_TRUE(SameBits(one.head->Bias(0, config.vocab_size), values.bias)) << "bias";
    }
    const bool sgd = config.optimizer.kind == OptimizerKind::kSgd;
    const std::string first = sgd ? "momentum_buffer" : "exp_avg";
    const RowSpan rows = one.stepped();
    const auto expect = [&](const std::string& name, int64_t columns, const std::vector<float>& whole) {
      if (whole.empty()) return;
      EXPECT_TRUE(SameBits(StateRows(one, name, columns, rows), RowsIn(whole, columns, rows))) << name;
    };
    expect("master_weight", config.hidden_size, values.master);
    expect(first, config.hidden_size, values.first);
    expect("exp_avg_sq", config.hidden_size, values.second);
    expect("bias." + first, 1, values.bias_first);
    expect("bias.exp_avg_sq", 1, values.bias_second);
  }

  // The fp32 master of a head at one server.
  static std::vector<float> Master(HeadUnderTest& head) {
    const std::vector<unsigned char> bytes = head.Weights(DataType::kFloat32, 0, head.config().vocab_size);
    std::vector<float> master(bytes.size() / sizeof(float));
    std::memcpy(master.data(), bytes.data(), bytes.size());
    return master;
  }

  static void ExpectSum(Replicas::One& one, const GradientValues& sum) {
    const int64_t hidden = one.head->config().hidden_size;
    const RowSpan rows = one.stepped();
    std::vector<float> dw(static_cast<size_t>(rows.count * hidden));
    std::vector<float> db(sum.db.empty() ? 0 : static_cast<size_t>(rows.count));
    EXPECT_TRUE(one.backend().ReadSum(rows.first, rows.count, dw.data()).ok());
    EXPECT_TRUE(SameBits(dw, RowsIn(sum.dw, hidden, rows)));
    if (db.empty()) return;
    EXPECT_TRUE(one.backend().ReadBiasSum(rows.first, rows.count, db.data()).ok());
    EXPECT_TRUE(SameBits(db, RowsIn(sum.db, 1, rows)));
  }
};

INSTANTIATE_TEST_SUITE_P(All, Slices, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Slices, StepsHaveTheBitsOfOneServerThatHasTheSum) {
  for (int32_t size = 2; size <= Most(TriesMoreReplicas() ? 4 : 3); ++size) {
    for (const auto& [name, arguments] : OptimizersUnderTest()) {
      SCOPED_TRACE(std::to_string(size) + " replicas, " + name);
      const HeadConfig config = ConfigOf(arguments, Masters().back(), HeadBias::kYes);
      Replicas replicas = Make(size, config);
      HeadValues values = RandomValues(config, 1);
      PublishAll(replicas, values);
      std::vector<std::vector<GradientValues>> gradients;
      std::vector<GradientStats> stats;
      OptimizerArguments step = arguments;
      for (step.step = 1; step.step <= kSteps; ++step.step) {
        gradients.push_back(RandomGradients(config, size, 1000 * static_cast<uint64_t>(step.step)));
        // In the second one of them has nothing to add.
        if (step.step == 2) gradients[1][1] = NoGradient(config);
        stats.push_back(Step(config, step, SumOf(gradients.back()), &values));
      }
      replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
        for (size_t i = 0; i < kSteps; ++i) {
          HeadUnderTest& head = *replicas.at(replica).head;
          if (i != 1 || replica != 1) Write(head, gradients[i][static_cast<size_t>(replica)]);
          OptimizerArguments now = arguments;
          now.step = static_cast<int64_t>(i) + 1;
          ExpectStats(StepTogether(head, now, others.communicators), stats[i]);
          head.backend().ResetGradient();
        }
      });
      for (int32_t replica = 0; replica < size; ++replica) {
        SCOPED_TRACE("replica " + std::to_string(replica));
        ExpectSum(replicas.at(replica), SumOf(gradients.back()));
        ExpectValues(replicas.at(replica), values);
      }
    }
  }
}

TEST_P(Slices, HeadsOfAnyShapeAreStepped) {
  struct Shape {
    int32_t replicas;
    int64_t vocab;
    int64_t hidden;
  };
  // Fewer rows than replicas, one column, and slices that go in several pieces.
  for (const Shape& shape :
       {Shape{Most(3), 1, 5}, Shape{Most(3), 2, 5}, Shape{2, 301, 1}, Shape{2, RowsOfSeveralPieces(), 2048},
        Shape{Most(3), RowsOfSeveralPieces(), 2048}}) {
    SCOPED_TRACE(std::to_string(shape.vocab) + " x " + std::to_string(shape.hidden));
    const bool small = shape.vocab < 1000;
    HeadConfig config = ConfigOf(kAdamW, small ? Masters().back() : MasterWeights::kNo, HeadBias::kNo);
    config.vocab_size = shape.vocab;
    config.hidden_size = shape.hidden;
    Replicas replicas = Make(shape.replicas, config);
    HeadValues values = RandomValues(config, 1);
    PublishAll(replicas, values);
    Step(config, kAdamW, WriteAll(replicas, RandomGradients(config, shape.replicas, 5)), &values);
    replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
      StepTogether(*replicas.at(replica).head, kAdamW, others.communicators);
    });
    for (int32_t replica = 0; replica < shape.replicas; ++replica) {
      ExpectValues(replicas.at(replica), values);
    }
  }
}

TEST_P(Slices, BlendsHaveTheBitsOfOneServer) {
  const int32_t size = Most(3);
  for (const MasterWeights of_source : Masters()) {
    for (const MasterWeights of_target : Masters()) {
      const HeadConfig from = ConfigOf(kAdamW, of_source, HeadBias::kYes);
      HeadConfig to = ConfigOf(kAdamW, of_target, HeadBias::kYes);
      to.weight_gradients = WeightGradients::kFrozen;
      to.optimizer = {};
      const bool of_slices = from.master_weights || to.master_weights;
      HeadUnderTest one_source(device_.get(), from);
      HeadUnderTest one_target(device_.get(), to);
      Publish(one_source, RandomValues(from, 3));
      Publish(one_target, RandomValues(to, 1));
      Replicas targets = Make(size, to);
      PublishAll(targets, RandomValues(to, 1));
      std::vector<std::unique_ptr<HeadUnderTest>> sources;
      for (int32_t replica = 0; replica < size; ++replica) {
        const Replicas::One& one = targets.at(replica);
        sources.push_back(std::make_unique<HeadUnderTest>(one.device.get(), from, one.shard));
        Publish(*sources.back(), RandomValues(from, 3));
      }
      for (const double decay : {0.75, 0.25, 0.0}) {
        ASSERT_TRUE(one_target.backend().BlendWeights(one_source.backend(), decay).ok());
        targets.Together([&](int32_t replica, const ReplicaConnections& others) {
          HeadBackend& backend = targets.at(replica).backend();
          absl::Status blended =
              backend.BlendWeights(sources[static_cast<size_t>(replica)]->backend(), decay);
          if (blended.ok() && of_slices && decay > 0) blended = backend.GatherSlices(others.communicators);
          EXPECT_TRUE(blended.ok()) << blended;
        });
        HeadValues values;
        values.weight = one_target.Weights(to.weight_type, 0, to.vocab_size);
        values.bias = one_target.Bias(0, to.vocab_size);
        if (to.master_weights) values.master = Master(one_target);
        for (int32_t replica = 0; replica < size; ++replica) ExpectValues(targets.at(replica), values);
      }
    }
  }
}

TEST_P(Slices, ASumThatBrokeOffIsMadeAgain) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
  const int32_t size = Most(3);
  Replicas replicas = Make(size, config);
  HeadValues values = RandomValues(config, 1);
  PublishAll(replicas, values);
  const std::vector<GradientValues> before = RandomGradients(config, size, 5);
  WriteAll(replicas, before);
  const std::unique_ptr<HeadUnderTest> lost = MatrixAlone(replicas.at(size - 1), before.back());
  replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
    HeadBackend& backend = replicas.at(replica).backend();
    if (replica == size - 1) {  // is lost between dW's sum and the bias's
      const absl::Status summed = lost->backend().SumSlices(nullptr, others.communicators);
      EXPECT_TRUE(summed.ok()) << summed;
      return others.lose();
    }
    const absl::Status broken = backend.SumSlices(nullptr, others.communicators);
    EXPECT_EQ(broken.code(), absl::StatusCode::kUnavailable) << broken;
    EXPECT_EQ(backend.StepSlices(ArgumentsOf(kAdamW)).code(), absl::StatusCode::kInternal);
  });
  // Clients have gone on meanwhile.
  const GradientValues sum = WriteAll(replicas, RandomGradients(config, size, 50));
  replicas.SumAll();
  Step(config, kAdamW, sum, &values);
  replicas.StepAll(ArgumentsOf(kAdamW));
  // Weights that did not come before a replica was lost come when it is back.
  replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
    if (replica == 0) return others.lose();
    const absl::Status broken = replicas.at(replica).backend().GatherSlices(others.communicators);
    EXPECT_EQ(broken.code(), absl::StatusCode::kUnavailable) << broken;
  });
  replicas.GatherAll();
  for (int32_t replica = 0; replica < size; ++replica) {
    ExpectSum(replicas.at(replica), sum);
    ExpectValues(replicas.at(replica), values);
  }
}

// What a replica has beside dW, for what label smoothing takes of all rows, is in the sum too.
TEST_P(Slices, GradientsOfBatchesAreAddedUpAndStayAsTheyAre) {
  const int32_t size = Most(3);
  for (const bool weighted : {false, true}) {
    SCOPED_TRACE(weighted ? "class weights" : "");
    Problem problem = kernels::testing::RandomProblem({.shape = {40, kVocab, kHidden}, .type = type()});
    problem.options.label_smoothing = 0.1f;
    problem.bias.assign(kVocab, 0.25f);
    if (weighted) {
      for (int64_t i = 0; i < kVocab; ++i) {
        problem.class_weights.push_back(0.5f + static_cast<float>(i % 7));
      }
    }
    Replicas replicas = Make(size, engine::testing::ConfigOf(problem));
    std::vector<GradientValues> gradients;
    for (int32_t replica = 0; replica < size; ++replica) {
      HeadUnderTest& head = *replicas.at(replica).head;
      head.Publish(problem.weight, problem.bias);
      head.Run(KindOf(problem), {RowsOf(problem, 10 * replica, 20)});
      gradients.push_back(Read(head));
    }
    replicas.SumAll();
    for (int32_t replica = 0; replica < size; ++replica) {
      SCOPED_TRACE("replica " + std::to_string(replica));
      HeadUnderTest& head = *replicas.at(replica).head;
      const GradientValues& own = gradients[static_cast<size_t>(replica)];
      ExpectSum(replicas.at(replica), SumOf(gradients));
      EXPECT_TRUE(SameValues(Read(head), own));
      // A window that opens again goes on.
      head.Run(KindOf(problem), {RowsOf(problem, 10 * replica, 20)});
      const GradientValues twice = Read(head);
      float largest = 0;
      float difference = 0;
      for (size_t i = 0; i < own.dw.size(); ++i) {
        largest = std::max(largest, std::abs(own.dw[i]));
        difference = std::max(difference, std::abs(twice.dw[i] - 2 * own.dw[i]));
      }
      EXPECT_LT(difference, 1e-5f * largest);
    }
  }
}

// Those of deterministic sessions, one after the other, each of which stays as it is.
TEST_P(Slices, GradientsOfOneReplicaAreAddedToTheSum) {
  for (const int64_t vocab : {kVocab, RowsOfSeveralPieces()}) {
    SCOPED_TRACE(vocab);
    const int32_t size = vocab == kVocab ? Most(3) : 2;
    HeadConfig config = ConfigOf(kAdamW, Masters().back(), vocab == kVocab ? HeadBias::kYes : HeadBias::kNo);
    config.vocab_size = vocab;
    if (vocab != kVocab) config.hidden_size = 2048;
    Replicas replicas = Make(size, config);
    GradientValues sum = WriteAll(replicas, RandomGradients(config, size, 5));
    const std::vector<GradientValues> added = RandomGradients(config, size, 77);
    std::vector<std::unique_ptr<Gradient>> gradients;
    for (int32_t replica = 0; replica < size; ++replica) {
      const GradientValues& own = added[static_cast<size_t>(replica)];
      gradients.push_back(*replicas.at(replica).device->CreateGradient(config));
      const absl::Status written = replicas.at(replica).backend().WriteGradient(
          gradients.back().get(), 0, vocab, own.dw.data(), config.bias ? own.db.data() : nullptr);
      EXPECT_TRUE(written.ok()) << written;
    }
    // One is enough of a large head.
    const int32_t last = vocab == kVocab ? 0 : size - 1;
    for (int32_t from = size - 1; from >= last; --from) sum = SumOf({sum, added[static_cast<size_t>(from)]});
    replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
      HeadBackend& backend = replicas.at(replica).backend();
      EXPECT_TRUE(backend.SumSlices(nullptr, others.communicators).ok());
      for (int32_t from = size - 1; from >= last; --from) {
        Gradient* const own = from == replica ? gradients[static_cast<size_t>(from)].get() : nullptr;
        const absl::Status status = backend.AddToSum(own, from, others.communicators);
        EXPECT_TRUE(status.ok()) << status;
      }
    });
    for (int32_t replica = 0; replica < size; ++replica) {
      SCOPED_TRACE("replica " + std::to_string(replica));
      ExpectSum(replicas.at(replica), sum);
      std::vector<float> dw(added.front().dw.size());
      const Gradient* const gradient = gradients[static_cast<size_t>(replica)].get();
      EXPECT_TRUE(replicas.at(replica).backend().ReadGradient(gradient, 0, vocab, dw.data()).ok());
      EXPECT_TRUE(SameBits(dw, added[static_cast<size_t>(replica)].dw));
    }
  }
}

// A device knows the largest of all weights, wherever they were stepped: rows whose logits could overflow
// must leave dW alone.
TEST_P(Slices, BatchesAfterAStepHaveTheBitsOfOneServer) {
  const Problem problem = kernels::testing::RandomProblem({.shape = {8, kVocab, kHidden}, .type = type()});
  HeadConfig config = engine::testing::ConfigOf(problem);
  config.optimizer.kind = OptimizerKind::kSgd;
  const OptimizerArguments sgd = {.rule = OptimizerRule::kSgd, .learning_rate = 1};
  for (const float last : {1.0f, std::numeric_limits<float>::infinity()}) {
    SCOPED_TRACE(last);
    GradientValues gradient = NoGradient(config);
    gradient.dw.back() = last;  // of the last slice
    Replicas replicas = Make(2, config);
    HeadUnderTest one(replicas.at(0).device.get(), config);
    one.Publish(problem.weight);
    Write(one, SumOf({gradient, gradient}));
    EXPECT_TRUE(one.backend().ApplyStep(nullptr, ArgumentsOf(sgd)).ok());
    one.backend().ResetGradient();
    const ChunkOutput expected = one.Run(KindOf(problem), {RowsOf(problem, 0, 8)}).front();
    for (int32_t replica = 0; replica < 2; ++replica) {
      replicas.at(replica).head->Publish(problem.weight);
      Write(*replicas.at(replica).head, gradient);
    }
    replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
      StepTogether(*replicas.at(replica).head, sgd, others.communicators);
    });
    for (int32_t replica = 0; replica < 2; ++replica) {
      SCOPED_TRACE("replica " + std::to_string(replica));
      HeadUnderTest& head = *replicas.at(replica).head;
      head.backend().ResetGradient();
      const ChunkOutput output = head.Run(KindOf(problem), {RowsOf(problem, 0, 8)}).front();
      EXPECT_TRUE(SameBits(output.losses, expected.losses));
      EXPECT_TRUE(SameBits(output.dx, expected.dx));
      EXPECT_TRUE(SameBits(head.Gradient(), one.Gradient()));
    }
  }
}

TEST_P(Slices, NothingIsSteppedWithoutASum) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
  for (const int32_t size : {1, 2}) {
    Replicas replicas = Make(size, config);
    const HeadValues values = RandomValues(config, 1);
    PublishAll(replicas, values);
    WriteAll(replicas, RandomGradients(config, size, 5));
    HeadBackend& first = replicas.at(0).backend();
    EXPECT_EQ(first.StepSlices(ArgumentsOf(kAdamW)).code(), absl::StatusCode::kInternal);
    float entry = 0;
    EXPECT_EQ(first.ReadBiasSum(0, 1, &entry).code(), absl::StatusCode::kInternal);
    ExpectValues(replicas.at(0), values);
  }
}

TEST_P(Slices, ASumThatIsNotFiniteIsTallied) {
  const HeadConfig config = ConfigOf(kAdamW, MasterWeights::kNo, HeadBias::kNo);
  const int32_t size = Most(3);
  Replicas replicas = Make(size, config);
  for (int32_t replica = 0; replica < size; ++replica) {
    GradientValues values = RandomGradient(config, static_cast<uint64_t>(replica));
    if (replica == 1) values.dw[7] = std::numeric_limits<float>::quiet_NaN();
    if (replica == size - 1) values.dw.back() = std::numeric_limits<float>::infinity();
    Write(*replicas.at(replica).head, values);
  }
  replicas.SumAll();
  replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
    const absl::StatusOr<GradientTallies> tallies =
        replicas.at(replica).backend().TallySum(1, others.communicators);
    ASSERT_TRUE(tallies.ok()) << tallies.status();
    EXPECT_TRUE(std::isnan(StatsOf(*tallies).norm));
    EXPECT_EQ(StatsOf(*tallies).non_finite, 2);
  });
}

TEST_P(Slices, StateIsThatOfTheRowsThatAReplicaSteps) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
  const int32_t size = Most(3);
  Replicas replicas = Make(size, config);
  HeadValues values = RandomValues(config, 1);
  PublishAll(replicas, values);
  std::vector<float> row(kHidden);
  for (int32_t replica = 0; replica < size; ++replica) {
    Replicas::One& one = replicas.at(replica);
    const RowSpan others = one.shard.slices().Slice((replica + 1) % size);
    const absl::Status read = one.backend().ReadState("exp_avg", others.first, 1, row.data());
    EXPECT_EQ(read.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(read.message()), HasSubstr("are not all stepped at this replica"));
    EXPECT_FALSE(one.backend().ReadSum(others.first, 1, row.data()).ok());
    EXPECT_FALSE(one.backend().WriteState("exp_avg", others.first, 1, row.data()).ok());
    if (config.master_weights) {
      EXPECT_FALSE(one.backend().ReadWeightRows(others.first, 1, DataType::kFloat32, row.data()).ok());
    }
    EXPECT_FALSE(one.backend().ApplyStep(nullptr, ArgumentsOf(kAdamW)).ok());
  }
}

// Whose master is elsewhere has weights of it.
TEST_P(Slices, AMastersRowThatIsWrittenWhereOthersStepItBecomesARowOfTheWeights) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kNo);
  const int32_t size = Most(3);
  Replicas replicas = Make(size, config);
  PublishAll(replicas, RandomValues(config, 1));
  const HeadValues values = RandomValues(config, 2);
  if (!config.master_weights) {
    const std::vector<float> row(kHidden);
    EXPECT_FALSE(replicas.at(0).backend().WriteState("master_weight", 0, 1, row.data()).ok());
    return;
  }
  for (int32_t replica = 0; replica < size; ++replica) {
    HeadBackend& backend = replicas.at(replica).backend();
    for (int64_t row = 0; row < kVocab; row += 100) {
      const int64_t rows = std::min<int64_t>(100, kVocab - row);
      const float* const from = &values.master[static_cast<size_t>(row * kHidden)];
      const absl::Status written = backend.WriteState("master_weight", row, rows, from);
      EXPECT_TRUE(written.ok()) << written;
    }
    EXPECT_TRUE(backend.RestoreState().ok());
    ExpectValues(replicas.at(replica), values);
  }
}

// State comes back row by row, to the replica that steps it.
TEST_P(Slices, AHeadThatIsRestoredGoesOn) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
  for (int32_t size = 2; size <= Most(3); ++size) {
    Replicas replicas = Make(size, config);
    HeadValues values = RandomValues(config, 1);
    for (auto* moment : {&values.first, &values.second, &values.bias_first, &values.bias_second}) {
      *moment = Squares(static_cast<int64_t>(moment->size()));
    }
    for (int32_t replica = 0; replica < size; ++replica) RestoreTo(values, replicas.at(replica));
    replicas.GatherAll();
    for (int32_t replica = 0; replica < size; ++replica) ExpectValues(replicas.at(replica), values);

    OptimizerArguments step = kAdamW;
    step.step = 8;
    Step(config, step, WriteAll(replicas, RandomGradients(config, size, 5)), &values);
    replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
      StepTogether(*replicas.at(replica).head, step, others.communicators);
    });
    for (int32_t replica = 0; replica < size; ++replica) ExpectValues(replicas.at(replica), values);
  }
}

int64_t BytesOf(const MemoryPlan& plan, const std::string& purpose) {
  for (const MemoryItem& item : plan) {
    if (item.purpose == purpose) return item.bytes;
  }
  return 0;
}

TEST_P(Slices, MemoryIsThatOfTheSlice) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kNo);
  for (int32_t size = 2; size <= Most(3); ++size) {
    Replicas replicas = Make(size, config);
    PublishAll(replicas, RandomValues(config, 1));
    int64_t rows = 0;
    for (int32_t replica = 0; replica < size; ++replica) {
      Replicas::One& one = replicas.at(replica);
      const MemoryPlan plan = *one.device->PlanShard(config, one.shard);
      const MemoryPlan report = one.backend().MemoryReport();
      for (const char* purpose : {"weights", "master_weights", "gradient", "optimizer", "replica_sums"}) {
        EXPECT_EQ(BytesOf(plan, purpose), BytesOf(report, purpose)) << purpose;
      }
      const int64_t whole = BytesOf(*one.device->PlanMemory(config), "optimizer");
      EXPECT_EQ(BytesOf(report, "optimizer") * config.vocab_size, whole * one.stepped().count);
      rows += one.stepped().count;
    }
    EXPECT_EQ(rows, config.vocab_size);
  }
}

// docs/scale-out.md#memory-of-a-replica: 6 + 16 / R bytes for each weight of 16 bits.
TEST_P(Slices, ALargeHeadReservesWhatItsSliceTakes) {
  HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kNo);
  config.vocab_size = 131072;
  config.hidden_size = 4096;
  const std::unique_ptr<Device> device = *CreateReplica(GetParam().device, 0);
  HeadShard shard = HeadShard::Whole(config.vocab_size);
  for (const int32_t size : {2, 4, 8}) {
    shard.replicas = size;
    for (shard.replica = 0; shard.replica < size; ++shard.replica) {
      const MemoryPlan plan = *device->PlanShard(config, shard);
      int64_t bytes = 0;
      for (const char* purpose : {"weights", "master_weights", "gradient", "optimizer", "replica_sums"}) {
        bytes += BytesOf(plan, purpose);
      }
      const int64_t whole = 4 + SizeOf(config.weight_type);            // dW and the weight
      const int64_t sliced = (config.master_weights ? 4 : 0) + 8 + 4;  // the master, moments, and the sum
      const int64_t computed = config.elements() * whole + config.elements() * sliced / size;
      EXPECT_GE(bytes, computed) << size << " replicas";
      EXPECT_LT(bytes, computed + kMostOnTheWay) << size << " replicas";
    }
  }
}

TEST_P(Slices, OthersThanItsReplicasAreNotMet) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kNo);
  Replicas replicas = Make(2, config);
  replicas.Together([&](int32_t replica, const ReplicaConnections& others) {
    const absl::Status refused = replicas.at(1 - replica).backend().SumSlices(nullptr, others.communicators);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  });
}

}  // namespace
}  // namespace lossd::engine::testing::slices_test
