// What defines a head: sizes and dtype. The memory a device needs for it follows from these alone.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_HEAD_CONFIG_H_
#define LOSSD_SERVER_ENGINE_CHUNK_HEAD_CONFIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "kernels/data_type.h"

namespace lossd::engine {

// A head whose weights are frozen has no dW: no memory for it, no product. Chunks are taken as ever.
enum class WeightGradients { kAccumulated, kFrozen };

enum class OptimizerKind { kNone, kSgd, kAdam, kAdamW };

// The arguments of torch.optim's optimizer of that name, with their defaults, but for the learning rate,
// which comes with each step.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kNone;
  double weight_decay = 0;  // AdamW's default is 0.01
  double momentum = 0;      // SGD; 0: it has no buffer
  double dampening = 0;     // SGD
  bool nesterov = false;    // SGD
  double beta1 = 0.9;       // Adam, AdamW
  double beta2 = 0.999;
  double eps = 1e-8;
  bool maximize = false;

  // Larger ones, of the learning rate too, could leave fp32.
  static constexpr double kMost = 1e18;

  bool operator==(const OptimizerConfig&) const = default;
  // fp32 tensors of the weights' shape that it keeps: 0 to 2.
  int moments() const;
};

struct HeadConfig {
  std::string name;         // 1 to 128 of [A-Za-z0-9._-], starting with a letter or a digit
  int64_t vocab_size = 0;   // V, 1 to 2^31 - 1
  int64_t hidden_size = 0;  // H, 1 to 2^20
  kernels::DataType weight_type = kernels::DataType::kBFloat16;
  // What belongs to the weights, so that no client can forget it; a request may override the numbers.
  float logit_scale = 1.0f;  // τ
  float softcap = 0.0f;      // c; 0: none
  // w [V], finite and at least 0, not all 0; null: none.
  std::shared_ptr<const std::vector<float>> class_weights = {};
  WeightGradients weight_gradients = WeightGradients::kAccumulated;
  // b, fp32 [V], which belongs to the weights: written, read and published with them.
  bool bias = false;
  OptimizerConfig optimizer = {};  // ApplyStep's; kNone for frozen heads
  // An fp32 copy of 16-bit weights, which writes, fp32 reads and the optimizer work on.
  bool master_weights = false;
  // A second gradient, for the next window while a flush holds this one. Not for frozen heads.
  bool double_buffer = false;
  // Sums over the vocabulary (log-sum-exps of rows, dX) are made over eight fixed segments, so that results
  // have the same bits on any number of devices (kernels/shard.h).
  bool fixed_segments = false;
  // Memory of the device in which phase one of batches leaves what phase two then need not compute again.
  // Devices that cannot hold it take none.
  int64_t held_bytes = 0;

  bool operator==(const HeadConfig& other) const;
  int64_t elements() const { return vocab_size * hidden_size; }
  int64_t weight_bytes() const { return elements() * kernels::SizeOf(weight_type); }
  int64_t bias_bytes() const { return bias ? vocab_size * 4 : 0; }
  // Bytes of dW, and of db.
  int64_t gradient_bytes() const { return weight_gradients == WeightGradients::kFrozen ? 0 : elements() * 4; }
  int64_t bias_gradient_bytes() const {
    return weight_gradients == WeightGradients::kFrozen ? 0 : bias_bytes();
  }
  int64_t class_weight_bytes() const {
    return class_weights == nullptr ? 0 : static_cast<int64_t>(class_weights->size() * sizeof(float));
  }
  // What writes are staged in, and what the optimizer works on.
  kernels::DataType master_type() const { return master_weights ? kernels::DataType::kFloat32 : weight_type; }
  int64_t staged_bytes() const { return elements() * kernels::SizeOf(master_type()); }
  int64_t master_bytes() const { return master_weights ? elements() * 4 : 0; }
  // Bytes of the weights' and the bias's state together.
  int64_t optimizer_bytes() const { return optimizer.moments() * (elements() * 4 + bias_bytes()); }
};

// A field of a configuration: the name that it has in files, and where it is.
template <typename Config, typename Value>
struct ConfigField {
  const char* name;
  Value Config::*value;
};
template <typename Config, typename Value>
ConfigField(const char*, Value Config::*) -> ConfigField<Config, Value>;

// Every field, listed once for whatever treats all of them alike: equality, manifests, the configuration
// file. The kind comes first: a default may depend on it.
inline constexpr std::tuple kOptimizerFields(ConfigField{"kind", &OptimizerConfig::kind},
                                             ConfigField{"weight_decay", &OptimizerConfig::weight_decay},
                                             ConfigField{"momentum", &OptimizerConfig::momentum},
                                             ConfigField{"dampening", &OptimizerConfig::dampening},
                                             ConfigField{"nesterov", &OptimizerConfig::nesterov},
                                             ConfigField{"beta1", &OptimizerConfig::beta1},
                                             ConfigField{"beta2", &OptimizerConfig::beta2},
                                             ConfigField{"eps", &OptimizerConfig::eps},
                                             ConfigField{"maximize", &OptimizerConfig::maximize});
// Without class weights: files have them apart, as an array.
inline constexpr std::tuple kHeadFields(ConfigField{"name", &HeadConfig::name},
                                        ConfigField{"vocab_size", &HeadConfig::vocab_size},
                                        ConfigField{"hidden_size", &HeadConfig::hidden_size},
                                        ConfigField{"weight_dtype", &HeadConfig::weight_type},
                                        ConfigField{"logit_scale", &HeadConfig::logit_scale},
                                        ConfigField{"softcap", &HeadConfig::softcap},
                                        ConfigField{"frozen", &HeadConfig::weight_gradients},
                                        ConfigField{"bias", &HeadConfig::bias},
                                        ConfigField{"optimizer", &HeadConfig::optimizer},
                                        ConfigField{"master_weights", &HeadConfig::master_weights},
                                        ConfigField{"double_buffer", &HeadConfig::double_buffer},
                                        ConfigField{"fixed_segments", &HeadConfig::fixed_segments},
                                        ConfigField{"held_bytes", &HeadConfig::held_bytes});

// Calls visit(field) with one after the other.
template <typename Fields, typename Visit>
void ForEachField(const Fields& fields, const Visit& visit) {
  std::apply([&visit](const auto&... field) { (visit(field), ...); }, fields);
}

// For messages: everything but the name, so that two that differ look different (but for class weights).
std::string Describe(const HeadConfig& config);

// INVALID_ARGUMENT naming the field and its value.
absl::Status Validate(const HeadConfig& config);

// 1 to 128 of [A-Za-z0-9._-], starting with a letter or a digit: of heads, and of tags of checkpoints.
bool IsName(absl::string_view name);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_HEAD_CONFIG_H_
