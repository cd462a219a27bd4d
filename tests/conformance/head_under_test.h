// Drives a HeadBackend as the engine does, with guard areas around everything that it writes to, and checks
// what holds for every batch.
#ifndef LOSSD_TESTS_CONFORMANCE_HEAD_UNDER_TEST_H_
#define LOSSD_TESTS_CONFORMANCE_HEAD_UNDER_TEST_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "server/engine/device/head_backend.h"
#include "tests/conformance/device_under_test.h"
#include "tests/conformance/row_return_values.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::engine::testing {

using kernels::DataType;
using kernels::testing::GuardedBytes;
using kernels::testing::Problem;

inline constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
inline constexpr int64_t kIgnoreIndex = -100;

struct ChunkInput {
  std::vector<unsigned char> hidden_states;
  std::vector<unsigned char> teacher_hidden = {};
  std::vector<int64_t> labels;
  int64_t ignore_index = kIgnoreIndex;
  float gradient_scale = 1.0f;
  std::optional<float> z_gradient_scale = {};
  std::vector<float> token_weights = {};
  std::vector<float> lse_gradients = {};
  std::vector<float> entropy_gradients = {};
  std::vector<int64_t> kept_offsets = {};  // or empty: no lists
  std::vector<int32_t> kept_tokens = {};
  std::optional<kernels::testing::TargetProblem> targets = {};
  ChunkRows::Accumulate accumulate = ChunkRows::Accumulate::kYes;
};

struct ChunkOutput {
  std::vector<float> losses;
  std::vector<float> dx;  // widened
  RowReturnValues returns;
};

// Rows [first, first + count) of a problem.
ChunkInput RowsOf(const Problem& problem, int64_t first, int64_t count);

// A batch from its start to its end. Must be awaited.
class BatchUnderWay {
 public:
  BatchUnderWay(Device* device, HeadBackend* backend, int64_t hidden, const BatchKey& kind,
                std::vector<ChunkInput> chunks);
  BatchUnderWay(const BatchUnderWay&) = delete;
  BatchUnderWay& operator=(const BatchUnderWay&) = delete;

  // Polls the device until the batch is done. Chunks were told of once each, in order, before the end, and
  // nothing beside their arrays was touched; all of that is expected here.
  std::vector<ChunkOutput> Await();
  const BatchReport& report() const { return report_; }

 private:
  Device* const device_;
  const int64_t hidden_;
  const BatchKey kind_;
  const std::vector<ChunkInput> chunks_;
  std::deque<GuardedBytes> losses_;
  std::deque<GuardedBytes> dx_;
  std::deque<GuardedReturns> returns_;
  std::vector<size_t> told_;
  std::vector<ChunkOutput> outputs_;  // as they were when they were told of
  std::optional<absl::Status> done_;
  BatchReport report_;
};

class HeadUnderTest {
 public:
  // Without weights.
  HeadUnderTest(Device* device, HeadConfig config);
  HeadUnderTest(Device* device, int64_t vocab, int64_t hidden, DataType type);
  // What a replica has of it.
  HeadUnderTest(Device* device, HeadConfig config, const HeadShard& shard);
  // With the problem's, its class weights and its bias.
  HeadUnderTest(Device* device, const Problem& problem);

  // Weights of the head's master_type.
  void Publish(const std::vector<unsigned char>& weights, const std::vector<float>& bias = {});
  std::unique_ptr<BatchUnderWay> Start(const BatchKey& kind, std::vector<ChunkInput> chunks);
  std::vector<ChunkOutput> Run(const BatchKey& kind, std::vector<ChunkInput> chunks);
  // One chunk of everything, with dX in fp32.
  ChunkOutput Run(const Problem& problem, const WantedReturns& returns = {});
  // Beside the head's own.
  std::unique_ptr<engine::Gradient> CreateGradient();
  // Rows of a gradient, null for the head's own, through a guarded buffer.
  std::vector<float> Gradient(int64_t first_row, int64_t rows, const engine::Gradient* of = nullptr);
  std::vector<float> Gradient() { return Gradient(0, config_.vocab_size); }
  std::vector<float> Gradient(const engine::Gradient* of) { return Gradient(0, config_.vocab_size, of); }
  // The same of the bias's; empty of a head without one.
  std::vector<float> BiasGradient(int64_t first_row, int64_t rows);
  std::vector<float> BiasGradient() { return BiasGradient(0, config_.vocab_size); }
  // Statistics of a gradient, null for the head's own.
  GradientStats Stats(const engine::Gradient* of = nullptr, double scale = 1);
  std::vector<float> Bias(int64_t first_row, int64_t rows);
  // Rows of the weights as `type`, through a guarded buffer.
  std::vector<unsigned char> Weights(DataType type, int64_t first_row, int64_t rows);

  // As the teacher of `problem`, whose teacher it is, and of `student`, which is prepared for it.
  TeacherKind AsTeacher(const Problem& problem, HeadUnderTest& student);

  HeadBackend& backend() { return *backend_; }
  const HeadConfig& config() const { return config_; }

 private:
  Device* const device_;
  const HeadConfig config_;
  std::unique_ptr<HeadBackend> backend_;
};

// Configurations of a problem's head and of its teacher.
HeadConfig ConfigOf(const Problem& problem);
HeadConfig TeacherConfigOf(const Problem& problem);

// What kind of batch a problem's hidden states make.
BatchKey KindOf(const Problem& problem, DataType dx_type = DataType::kFloat32);

class OnDevice {
 protected:
  // Skips the test where there is no such device.
  void CreateDevice(const DeviceUnderTest& which, int64_t workspace_bytes = kWorkspaceBytes);
  // The same, also where it has no heads of this type.
  void CreateDeviceFor(const DeviceUnderTest& which, DataType type);
  bool HasHeadsOf(DataType type) const;
  std::unique_ptr<Device> device_;
};

// A suite that runs each test for every device and type of head.
struct DeviceAndType {
  DeviceUnderTest device;
  DataType type;
};
std::vector<DeviceAndType> DevicesAndTypes();
// Those for which options alone are tried as well.
std::vector<DeviceAndType> DevicesAndTypesForOptions();
std::string NameOf(const DeviceAndType& parameter);  // "cpu_float32"
std::ostream& operator<<(std::ostream& out, const DeviceAndType& parameter);

class HeadTest : public ::testing::TestWithParam<DeviceAndType>, protected OnDevice {
 protected:
  void SetUp() override { CreateDeviceFor(GetParam().device, type()); }
  DataType type() const { return GetParam().type; }
  Oracle oracle() const { return GetParam().device.oracle; }
  // Whether the device takes vocabularies of that size. Every one takes 8.
  bool Takes(int64_t vocab) const { return vocab >= ranks(); }
  int32_t ranks() const { return GetParam().device.ranks; }
  // No rank has less of a head of `bytes`.
  int64_t LeastPart(int64_t bytes) const { return ranks() == 1 ? bytes : bytes / (2 * ranks()); }
  // What a problem's results are to be: those of the device's oracle.
  kernels::testing::Reference Expected(const Problem& problem) const;
  // By how much gradients may differ, relatively, among themselves and from what is expected: there both have
  // an error.
  double GradientError() const { return GetParam().device.gradient_error(type()); }
  double GradientTolerance() const;
  // The same of an error that no device's rows exceed.
  double RowTolerance(double error) const { return oracle() == Oracle::kReference ? error : 2 * error; }
};

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_HEAD_UNDER_TEST_H_
