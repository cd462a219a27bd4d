// What defines a head: sizes and dtype. The memory a device needs for it follows from these alone.
#ifndef LOSSD_SERVER_ENGINE_HEAD_CONFIG_H_
#define LOSSD_SERVER_ENGINE_HEAD_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/data_type.h"

namespace lossd::engine {

struct HeadConfig {
  std::string name;         // 1 to 128 of [A-Za-z0-9._-], starting with a letter or a digit
  int64_t vocab_size = 0;   // V, 1 to 2^31 - 1
  int64_t hidden_size = 0;  // H, 1 to 2^20
  kernels::DataType weight_type = kernels::DataType::kBFloat16;

  bool operator==(const HeadConfig&) const = default;
  int64_t elements() const { return vocab_size * hidden_size; }
  int64_t weight_bytes() const { return elements() * kernels::SizeOf(weight_type); }
  int64_t gradient_bytes() const { return elements() * 4; }
};

// INVALID_ARGUMENT naming the field and its value.
absl::Status Validate(const HeadConfig& config);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_CONFIG_H_
