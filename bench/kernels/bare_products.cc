#include "bench/kernels/bare_products.h"

#include <dnnl.hpp>
#include <utility>

#include "kernels/cpu/gemm.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::cpu::Multiply;
using kernels::cpu::Operand;
using kernels::cpu::Store;

bool Done(dnnl::status status) { return status == dnnl::status::success; }

BareProducts Sgemm(BareOperands& o) {
  const int64_t n = o.tokens;
  const int64_t v = o.vocab;
  const int64_t h = o.hidden;
  const auto logits = [&o, n, v, h] {
    return Done(dnnl::sgemm('N', 'T', n, v, h, 1, o.hidden_states.data(), h, o.weight.data(), h, 0,
                            o.logits.data(), v));
  };
  const auto dx = [&o, n, v, h] {
    return Done(dnnl::sgemm('N', 'N', n, h, v, 1, o.logit_gradients.data(), v, o.weight.data(), h, 0,
                            o.dx.data(), h));
  };
  const auto dw = [&o, n, v, h] {
    return Done(dnnl::sgemm('T', 'N', v, h, n, 1, o.logit_gradients.data(), v, o.hidden_states.data(), h, 1,
                            o.dw.data(), h));
  };
  return {"float32 sgemm", {logits, dx, dw}};
}

BareProducts Matmul(std::string kind, DataType type, const void* x, const void* w, const void* dz,
                    BareOperands& o) {
  const int64_t n = o.tokens;
  const int64_t v = o.vocab;
  const int64_t h = o.hidden;
  const auto logits = [=, &o] {
    return Multiply(type, n, v, h, Operand{x, h, 1}, Operand{w, 1, h}, o.logits.data(), v, Store::kOverwrite);
  };
  const auto dx = [=, &o] {
    return Multiply(type, n, h, v, Operand{dz, v, 1}, Operand{w, h, 1}, o.dx.data(), h, Store::kOverwrite);
  };
  const auto dw = [=, &o] {
    return Multiply(type, v, h, n, Operand{dz, 1, v}, Operand{x, h, 1}, o.dw.data(), h, Store::kAdd);
  };
  return {std::move(kind), {logits, dx, dw}};
}

std::vector<uint16_t> Narrow(const std::vector<float>& values) {
  std::vector<uint16_t> narrow(values.size());
  kernels::Convert(DataType::kFloat32, values.data(), DataType::kBFloat16, narrow.data(),
                   static_cast<int64_t>(values.size()));
  return narrow;
}

}  // namespace

std::vector<BareProducts> AllBareProducts(DataType head_type, BareOperands& operands) {
  BareOperands& o = operands;
  std::vector<BareProducts> all;
  all.push_back(Sgemm(o));
  all.push_back(Matmul("float32 matmul", DataType::kFloat32, o.hidden_states.data(), o.weight.data(),
                       o.logit_gradients.data(), o));
  if (head_type != DataType::kBFloat16) return all;
  o.narrow_weight = Narrow(o.weight);
  o.narrow_hidden_states = Narrow(o.hidden_states);
  o.narrow_logit_gradients = Narrow(o.logit_gradients);
  all.push_back(Matmul("bfloat16 matmul", DataType::kBFloat16, o.narrow_hidden_states.data(),
                       o.narrow_weight.data(), o.narrow_logit_gradients.data(), o));
  return all;
}

}  // namespace lossd::bench
