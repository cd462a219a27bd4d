#include "tests/bench/bare_products.h"

#include <dnnl.hpp>
#include <tuple>

#include "kernels/cpu/gemm.h"

namespace lossd::bench {
namespace {

using kernels::DataType;
using kernels::cpu::Multiply;
using kernels::cpu::Operand;
using kernels::cpu::Store;

bool RunSgemm(BareOperands& o) {
  const auto [n, v, h] = std::tuple(o.tokens, o.vocab, o.hidden);
  const auto done = [](dnnl::status status) { return status == dnnl::status::success; };
  return done(dnnl::sgemm('N', 'T', n, v, h, 1, o.hidden_states.data(), h, o.weight.data(), h, 0,
                          o.logits.data(), v)) &&
         done(dnnl::sgemm('N', 'N', n, h, v, 1, o.logit_gradients.data(), v, o.weight.data(), h, 0,
                          o.dx.data(), h)) &&
         done(dnnl::sgemm('T', 'N', v, h, n, 1, o.logit_gradients.data(), v, o.hidden_states.data(), h, 1,
                          o.dw.data(), h));
}

bool RunMatmul(DataType type, const void* x, const void* w, const void* dz, BareOperands& o) {
  const auto [n, v, h] = std::tuple(o.tokens, o.vocab, o.hidden);
  return Multiply(type, n, v, h, Operand{x, h, 1}, Operand{w, 1, h}, o.logits.data(), v, Store::kOverwrite) &&
         Multiply(type, n, h, v, Operand{dz, v, 1}, Operand{w, h, 1}, o.dx.data(), h, Store::kOverwrite) &&
         Multiply(type, v, h, n, Operand{dz, 1, v}, Operand{x, h, 1}, o.dw.data(), h, Store::kAdd);
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
  all.push_back({"float32 sgemm", [&o] { return RunSgemm(o); }});
  all.push_back({"float32 matmul", [&o] {
                   return RunMatmul(DataType::kFloat32, o.hidden_states.data(), o.weight.data(),
                                    o.logit_gradients.data(), o);
                 }});
  if (head_type != DataType::kBFloat16) return all;
  o.narrow_weight = Narrow(o.weight);
  o.narrow_hidden_states = Narrow(o.hidden_states);
  o.narrow_logit_gradients = Narrow(o.logit_gradients);
  all.push_back({"bfloat16 matmul", [&o] {
                   return RunMatmul(DataType::kBFloat16, o.narrow_hidden_states.data(),
                                    o.narrow_weight.data(), o.narrow_logit_gradients.data(), o);
                 }});
  return all;
}

}  // namespace lossd::bench
