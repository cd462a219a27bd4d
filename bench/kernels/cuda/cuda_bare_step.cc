// By NCCL's own collectives.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <type_traits>
#include <vector>

#include "bench/kernels/command_line.h"
#include "bench/kernels/cuda/cuda_random.h"
#include "bench/kernels/replicas/bare_step.h"
#include "kernels/collectives/nccl_library.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/rounding.h"

namespace lossd::bench {
namespace {

using kernels::collectives::NcclComm;
using kernels::collectives::NcclLibrary;
using kernels::collectives::NcclStatus;
using kernels::collectives::NcclUniqueId;
using kernels::collectives::Rendezvous;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;
using kernels::cuda::Stream;

constexpr char kNccl[] = "libnccl.so.2";
constexpr int64_t kRowAlignment = 8;  // of rows in elements, as heads have it

// What lossd does not call; declared after the library's reference.
struct NcclCollectives {
  static constexpr int kFloat = 7;  // ncclDataType_t
  static constexpr int kSum = 0;    // ncclRedOp_t

  NcclStatus (*reduce_scatter)(const void* from, void* to, size_t count, int type, int operation,
                               NcclComm* comm, cudaStream_t stream) = nullptr;
  NcclStatus (*all_gather)(const void* from, void* to, size_t count, int type, NcclComm* comm,
                           cudaStream_t stream) = nullptr;

  bool Find() {
    void* const opened = dlopen(kNccl, RTLD_NOW);
    if (opened == nullptr) return false;
    const auto find = [opened](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(opened, name));
      return *function != nullptr;
    };
    return find("ncclReduceScatter", &reduce_scatter) && find("ncclAllGather", &all_gather);
  }
};

class CudaBareStep final : public BareStep {
 public:
  CudaBareStep(const ReplicaCase& of, int replica, Rendezvous& rendezvous)
      : case_(of), replica_(replica), rendezvous_(rendezvous) {}
  ~CudaBareStep() override {
    if (comm_ != nullptr) (void)nccl_->destroy(comm_);
  }

  std::string Create() override {
    if (const Result taken = Take(); !taken.ok()) return taken.message();
    return Connect();
  }
  std::string ReduceScatter() override {
    const auto count = static_cast<size_t>(part_);
    return Done(collectives_.reduce_scatter(gradient_.data(), sum_.data(), count, NcclCollectives::kFloat,
                                            NcclCollectives::kSum, comm_, stream_.get()));
  }
  std::string Step() override {
    kernels::cuda::StepTensor tensor;
    tensor.shape = {SteppedRowsOf(case_, replica_), case_.step.hidden, stride_};
    tensor.gradient.values = static_cast<const float*>(gradient_.data());
    tensor.weight_type = case_.step.dtype;
    tensor.weight = weight_.data();
    tensor.master = static_cast<float*>(master_.data());
    tensor.first_moment = static_cast<float*>(first_.data());
    tensor.second_moment = static_cast<float*>(second_.data());
    const Result result =
        kernels::cuda::ApplyOptimizer(tensor, CoefficientsAt(case_.step, kCheckedStep), scratch_.data(),
                                      static_cast<kernels::GradientTally*>(tally_.data()), stream_.get());
    return result.ok() ? Done(NcclStatus::kSuccess) : result.message();
  }
  std::string AllGather() override {
    const int64_t bytes = part_ * SizeOf(case_.step.dtype);
    auto* const all = static_cast<char*>(weight_.data());
    return Done(collectives_.all_gather(all + replica_ * bytes, all, static_cast<size_t>(bytes),
                                        NcclLibrary::kBytes, comm_, stream_.get()));
  }

 private:
  Result Take() {
    const OptimizerCase& of = case_.step;
    LOSSD_CUDA_TRY(cudaSetDevice(CudaIndex(case_.devices[static_cast<size_t>(replica_)])));
    LOSSD_CUDA_PASS_ON(Stream::Create(&stream_));
    stride_ = kernels::RoundUp(of.hidden, kRowAlignment);
    const int64_t elements = of.vocab * stride_;
    part_ = elements / case_.replicas();
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(elements * 4, &gradient_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(part_ * 4, &sum_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(elements * SizeOf(of.dtype), &weight_));
    const int64_t stepped = SteppedRowsOf(case_, replica_) * stride_ * 4;
    std::vector<DeviceBuffer*> kept = {&first_, &second_};
    if (of.has_master()) kept.push_back(&master_);
    for (DeviceBuffer* buffer : kept) {
      LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(stepped, buffer));
      LOSSD_CUDA_TRY(cudaMemset(buffer->data(), 0, static_cast<size_t>(stepped)));
    }
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(kernels::cuda::TallyScratchBytes(), &scratch_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(kernels::GradientTally), &tally_));
    LOSSD_CUDA_PASS_ON(
        FillNormal(kernels::DataType::kFloat32, gradient_.data(), elements, kGradientDeviation, 1));
    LOSSD_CUDA_PASS_ON(FillNormal(of.dtype, weight_.data(), elements, kWeightDeviation, 2));
    LOSSD_CUDA_TRY(cudaDeviceSynchronize());
    return {};
  }

  std::string Connect() {
    if (const auto opened = NcclLibrary::Open(kNccl, &nccl_); !opened.ok()) return opened.message();
    if (!collectives_.Find()) return "the NCCL library has no collectives";
    NcclUniqueId id{};
    std::string own;
    if (replica_ == 0) {
      if (nccl_->get_unique_id(&id) != NcclStatus::kSuccess) return "NCCL gives no id";
      own.assign(id.bytes, sizeof(id.bytes));
    }
    std::vector<std::string> all;
    const auto met = rendezvous_.AllGather(std::move(own), std::chrono::minutes(2), &all);
    if (!met.ok()) return met.message();
    std::memcpy(id.bytes, all[0].data(), sizeof(id.bytes));
    kernels::collectives::NcclConfig config;
    return Said(nccl_->init_rank(&comm_, case_.replicas(), id, replica_, &config));
  }

  std::string Said(NcclStatus status) const {
    return status == NcclStatus::kSuccess ? "" : nccl_->Describe(status, comm_);
  }
  std::string Done(NcclStatus status) const {
    if (status != NcclStatus::kSuccess) return Said(status);
    const cudaError_t waited = cudaStreamSynchronize(stream_.get());
    return waited == cudaSuccess ? "" : cudaGetErrorString(waited);
  }

  const ReplicaCase& case_;
  const int replica_;
  Rendezvous& rendezvous_;
  std::shared_ptr<const NcclLibrary> nccl_;
  NcclCollectives collectives_;
  NcclComm* comm_ = nullptr;
  Stream stream_;
  int64_t stride_ = 0;
  int64_t part_ = 0;  // elements of a slice, all but the rest of a division
  DeviceBuffer gradient_, sum_, weight_, master_, first_, second_, scratch_, tally_;
};

}  // namespace

std::unique_ptr<BareStep> MakeCudaBareStep(const ReplicaCase& of, int replica, Rendezvous& rendezvous) {
  return std::make_unique<CudaBareStep>(of, replica, rendezvous);
}

}  // namespace lossd::bench
