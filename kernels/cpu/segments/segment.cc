#include "kernels/cpu/segments/segment.h"

namespace lossd::kernels::cpu {
namespace {

template <class T>
T* Advanced(T* pointer, int64_t count) {
  return pointer == nullptr ? nullptr : pointer + count;
}

const void* Rows(const void* matrix, DataType type, int64_t first, int64_t columns) {
  return matrix == nullptr ? nullptr : static_cast<const char*>(matrix) + first * columns * SizeOf(type);
}

}  // namespace

void Segment::Set(const LinearCrossEntropyParams& params, int64_t first, int64_t entries,
                  int64_t shard_first) {
  const int64_t local = first - shard_first;
  first_ = first;
  params_ = params;
  params_.shard = nullptr;
  params_.vocab = entries;
  params_.weight = Rows(params.weight, params.weight_type, local, params.hidden);
  params_.bias = Advanced(params.bias, local);
  params_.class_weights = Advanced(params.class_weights, first);
  params_.dw = Advanced(params.dw, local * params.hidden);
  params_.db = Advanced(params.db, local);
  if (params.teacher != nullptr) {
    teacher_ = *params.teacher;
    teacher_.weight = Rows(teacher_.weight, teacher_.weight_type, local, teacher_.hidden);
    teacher_.bias = Advanced(teacher_.bias, local);
    params_.teacher = &teacher_;
  }
  weight_ = {params_.weight_type, params_.weight, entries, params_.hidden};
}

void Segment::BindProducts(Arithmetic arithmetic, const Workspace& tile) {
  tile_ = &tile;
  if (arithmetic == Arithmetic::kSimd) {
    products_ = &simd_.emplace(BestSimdKernels(), weight_, tile);
  } else {
    products_ = &library_.emplace(weight_, tile);
  }
}

void Segment::BindStep(Arithmetic arithmetic, const Workspace& tile, const SoftTile& soft) {
  BindProducts(arithmetic, tile);
  const SoftTargets* targets = nullptr;
  if (params_.teacher != nullptr) targets = &soft_.emplace(params_, BestSimdKernels(), tile, soft);
  step_.emplace(params_, BestSimdKernels(), weight_, tile, *products_, FormFor(params_, arithmetic), targets);
}

LocalSegments::LocalSegments(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary) {
  for (int32_t i = vocabulary.first_segment(); i < vocabulary.end_segment(); ++i) {
    entries_[count_] = vocabulary.Entries(i);
    segments_[count_].Set(params, vocabulary.FirstEntry(i), entries_[count_], vocabulary.shard().first());
    ++count_;
  }
}

}  // namespace lossd::kernels::cpu
