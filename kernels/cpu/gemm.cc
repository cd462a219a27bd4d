#include "kernels/cpu/gemm.h"

#include <dnnl.hpp>
#include <new>

namespace lossd::kernels::cpu {
namespace {

dnnl::memory::data_type LibraryType(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return dnnl::memory::data_type::f32;
    case DataType::kBFloat16:
      return dnnl::memory::data_type::bf16;
    case DataType::kFloat16:
      return dnnl::memory::data_type::f16;
  }
  return dnnl::memory::data_type::undef;
}

dnnl::matmul::primitive_desc Describe(const dnnl::engine& engine, const dnnl::memory::desc& a,
                                      const dnnl::memory::desc& b, const dnnl::memory::desc& c,
                                      const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, a, b, c, attributes};
#else
  return {dnnl::matmul::desc(a, b, c), attributes, engine};
#endif
}

}  // namespace

bool Multiply(DataType type, int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, float* c,
              int64_t c_stride, Store store) {
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const dnnl::memory::desc a_layout({m, k}, LibraryType(type), {a.row_stride, a.column_stride});
    const dnnl::memory::desc b_layout({k, n}, LibraryType(type), {b.row_stride, b.column_stride});
    const dnnl::memory::desc c_layout({m, n}, dnnl::memory::data_type::f32, {c_stride, 1});
    dnnl::primitive_attr attributes;
    if (store == Store::kAdd) {
      dnnl::post_ops operations;
      operations.append_sum(1.0f);
      attributes.set_post_ops(operations);
    }
    // The library keeps what it compiled for a shape, so describing it again is cheap.
    const dnnl::matmul product(Describe(engine, a_layout, b_layout, c_layout, attributes));
    // The library's interface takes pointers to non-const for inputs too; it does not write to them.
    const dnnl::memory a_memory(a_layout, engine, const_cast<void*>(a.data));
    const dnnl::memory b_memory(b_layout, engine, const_cast<void*>(b.data));
    const dnnl::memory c_memory(c_layout, engine, c);
    product.execute(stream,
                    {{DNNL_ARG_SRC, a_memory}, {DNNL_ARG_WEIGHTS, b_memory}, {DNNL_ARG_DST, c_memory}});
    stream.wait();
    return true;
  } catch (const dnnl::error&) {
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool HasFastBFloat16() {
#if defined(__x86_64__)
  // The library's values are sets of bits, and every instruction set with AMX contains these; the list of
  // names differs between versions.
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto amx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
  return (isa & amx) == amx;
#else
  return false;
#endif
}

}  // namespace lossd::kernels::cpu
