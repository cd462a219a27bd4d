#include "kernels/cuda/soft_losses.h"

#include <algorithm>

#include "kernels/cuda/losses/part_soft_targets.h"
#include "kernels/cuda/portable/products.h"
#include "kernels/cuda/rows/row_returns.h"
#include "kernels/cuda/shard_returns.h"
#include "kernels/cuda/sharded_step.h"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda {
namespace {

constexpr auto kFoundBytes = static_cast<int64_t>(sizeof(SoftPart));
constexpr auto kTermsBytes = static_cast<int64_t>(sizeof(SoftTerms));
constexpr auto kBadBytes = static_cast<int64_t>(sizeof(int32_t));

int64_t PieceBytes(const Shard& shard, int64_t rows) {
  return shard.segments() * rows * (kFoundBytes + kTermsBytes + kBadBytes);
}

SoftPieces PiecesIn(char* memory, const Shard& shard, int32_t rows) {
  const int64_t count = static_cast<int64_t>(shard.segments()) * rows;
  char* const terms = memory + count * kFoundBytes;
  char* const bad = terms + count * kTermsBytes;
  return {shard.segments(), rows, reinterpret_cast<SoftPart*>(memory), reinterpret_cast<SoftTerms*>(terms),
          reinterpret_cast<int32_t*>(bad)};
}

}  // namespace

void SoftLosses::Buffers::Take(std::span<const int64_t> entries, Path path, const TeacherShape& teacher,
                               const Shard* shard, int64_t tile_rows, Divider* divider) {
  int64_t logit_bytes = 0;
  for (const int64_t count : entries) {
    logit_bytes += LogitRowsOf(tile_rows) * RoundUp(count, 8) * SizeOf(DataType::kFloat32);
  }
  divider->Take(&logits, logit_bytes);
  divider->Take(&teacher_logits, logit_bytes);
  divider->Take(&teacher_x, tile_rows * PaddedHidden(teacher.hidden) * SizeOf(teacher.weight_type));
  if (path == Path::kPortable || teacher.path == Path::kPortable) {
    divider->Take(&library, CublasLt::kWorkspaceBytes);
  }
  teacher_rows.Take(tile_rows, divider);
  if (shard != nullptr) divider->Take(&pieces, PieceBytes(*shard, LogitRowsOf(tile_rows)));
}

TileRows SoftLosses::DescribeTeacher(const TeacherHead& teacher, const TileRows& own) const {
  const Teacher& head = teacher.head;
  TileRows tile;
  tile.rows = own.rows;
  tile.vocab = own.vocab;
  tile.whole_vocab = own.whole_vocab;
  tile.hidden = head.hidden;
  tile.padded_hidden = PaddedHidden(head.hidden);
  tile.type = head.weight_type;
  tile.weight = head.weight;
  tile.bias = head.bias;
  tile.weight_largest = teacher.weight_largest;
  tile.bias_largest = teacher.bias_largest;
  tile.batch_rows = own.batch_rows;
  tile.labels = own.labels;
  tile.options = {.logit_scale = head.logit_scale, .softcap = head.softcap};
  tile.dependent_launches = own.dependent_launches;
  tile.x = b_.teacher_x;
  b_.teacher_rows.GiveTo(&tile);
  return tile;
}

Result SoftLosses::PrepareHead(const TileRows& tile, Path path, DataType hidden_type,
                               const void* hidden_states, cudaStream_t stream) const {
  LOSSD_CUDA_PASS_ON(PrepareRows(tile, hidden_type, hidden_states, stream));
  if (path != Path::kPortable) return {};
  // Products of the library take whole pieces: what is beyond the rows is zero, its results are not read.
  const int64_t row_bytes = tile.padded_hidden * SizeOf(tile.type);
  const int64_t more = RoundUp(tile.rows, logit_rows_) - tile.rows;
  LOSSD_CUDA_TRY(cudaMemsetAsync(static_cast<char*>(tile.x) + tile.rows * row_bytes, 0,
                                 static_cast<size_t>(more * row_bytes), stream));
  return {};
}

Result SoftLosses::Prepare(const Batch& batch, const TileRows& tile, cudaStream_t stream) const {
  const TeacherHead& teacher = *batch.teacher;
  LOSSD_CUDA_PASS_ON(PrepareHead(tile, path_, batch.hidden_type, batch.hidden_states, stream));
  return PrepareHead(DescribeTeacher(teacher, tile), teacher.path, teacher.head.hidden_type,
                     teacher.head.hidden_states, stream);
}

// `rows` rows of the tile from `first` on, at most logit_rows_.
Result SoftLosses::MultiplyHead(const TileRows& tile, Path path, CublasLt* library, int32_t first,
                                int32_t rows, float* logits, cudaStream_t stream) const {
  TileRows part = tile;
  part.rows = rows;
  part.x = static_cast<char*>(tile.x) + first * tile.padded_hidden * SizeOf(tile.type);
  const int64_t stride = RoundUp(tile.vocab, 8);
  if (path == Path::kHopper) return sm90::StoreLogits(part, logits, stride, stream);
  const PortableProducts products({tile.vocab, tile.hidden, tile.type}, library, b_.library);
  return products.Logits(logit_rows_, part.x, tile.weight, logits, stride, stream);
}

Result SoftLosses::MultiplyTeacher(const TeacherHead& teacher, const SegmentPart& part, int32_t first,
                                   int32_t rows, cudaStream_t stream) const {
  TileRows tile = DescribeTeacher(teacher, part.tile);
  tile.weight = static_cast<const char*>(tile.weight) + part.first * tile.padded_hidden * SizeOf(tile.type);
  return MultiplyHead(tile, teacher.path, teacher.library, first, rows, TeacherLogitsOf(part), stream);
}

Result SoftLosses::Run(const Batch& batch, const TileRows& tile, std::vector<SegmentPart> parts,
                       cudaStream_t stream, const StepObserver& observer) const {
  float* logits = b_.logits;
  for (SegmentPart& part : parts) {
    part.logits = logits;
    logits += logit_rows_ * part.stride;
  }
  for (int32_t first = 0; first < tile.rows; first += static_cast<int32_t>(logit_rows_)) {
    const auto rows = static_cast<int32_t>(std::min<int64_t>(logit_rows_, tile.rows - first));
    for (const SegmentPart& part : parts) {
      if (part.tile.vocab == 0) continue;
      LOSSD_CUDA_PASS_ON(MultiplyTeacher(*batch.teacher, part, first, rows, stream));
      observer.Report("teacher");
      LOSSD_CUDA_PASS_ON(MultiplyHead(part.tile, path_, library_, first, rows, part.logits, stream));
      observer.Report("logits");
    }
    // Which is of the batch, and of the tile only where its rows are answered.
    if (batch.returns.whole_row()) {
      LOSSD_CUDA_PASS_ON(TellWholeRows(tile, parts, first, rows, stream));
      observer.Report("returns");
    }
    LOSSD_CUDA_PASS_ON(exchange_.shard != nullptr
                           ? FinishSegments(batch, parts, first, rows, stream)
                           : FinishSoftRows(parts[0].tile, first, rows, TargetsOf(batch, parts[0]), stream));
    observer.Report("rows");
  }
  return tile.returns.whole_row() ? ForgetOverflowedRows(tile, stream) : Result();
}

Result SoftLosses::TellWholeRows(const TileRows& tile, std::span<const SegmentPart> parts, int32_t first,
                                 int32_t rows, cudaStream_t stream) const {
  if (exchange_.shard != nullptr) return exchange_.returns->Tell(tile, parts, first, rows, stream);
  return cuda::TellWholeRows(tile, first, rows, parts[0].logits, parts[0].stride, stream);
}

SoftTargets SoftLosses::TargetsOf(const Batch& batch, const SegmentPart& part) const {
  const Teacher& head = batch.teacher->head;
  SoftTargets targets;
  targets.options = batch.distillation;
  targets.teacher_options = {.logit_scale = head.logit_scale, .softcap = head.softcap};
  targets.teacher_bias = head.bias == nullptr ? nullptr : head.bias + part.first;
  targets.teacher_target_logits = b_.teacher_rows.target_logits;
  targets.teacher_overflowed = b_.teacher_rows.overflowed;
  targets.sums = part.logits;
  targets.teacher_sums = TeacherLogitsOf(part);
  targets.gradients = part.tile.gradient_wanted ? part.entries : nullptr;
  targets.stride = part.stride;
  return targets;
}

// Each step takes what all segments found in the one before.
Result SoftLosses::FinishSegments(const Batch& batch, std::span<const SegmentPart> parts, int32_t first,
                                  int32_t rows, cudaStream_t stream) const {
  const Shard& shard = *exchange_.shard;
  const SoftPieces pieces = PiecesIn(b_.pieces, shard, rows);
  const auto of_each = [&](auto find) {
    for (const SegmentPart& part : parts) {
      const SoftPartRows part_rows{first, part.number};
      LOSSD_CUDA_PASS_ON(find(part.tile, part_rows, TargetsOf(batch, part), pieces, stream));
    }
    return Result();
  };
  const auto gather = [&](void* all, int64_t bytes) {
    return GatherSegments(shard, exchange_.streams, all, rows * bytes, stream);
  };
  LOSSD_CUDA_PASS_ON(of_each(FindSoftParts));
  LOSSD_CUDA_PASS_ON(gather(pieces.found, kFoundBytes));
  LOSSD_CUDA_PASS_ON(of_each(FindSoftTerms));
  LOSSD_CUDA_PASS_ON(gather(pieces.terms, kTermsBytes));
  if (parts[0].tile.gradient_wanted && FormsAfterTerms(batch.distillation.divergence)) {
    LOSSD_CUDA_PASS_ON(of_each(FormSoftEntries));
    LOSSD_CUDA_PASS_ON(gather(pieces.bad, kBadBytes));
  }
  bool told = false;
  for (const SegmentPart& part : parts) {
    if (part.tile.vocab == 0) continue;
    TileRows tile = part.tile;
    // Every segment comes to the same losses.
    if (told) {
      tile.losses = nullptr;
      tile.returns = {};
    }
    told = true;
    LOSSD_CUDA_PASS_ON(FinishSoftParts(tile, first, TargetsOf(batch, part), pieces, stream));
  }
  return {};
}

Result SoftLosses::LoadProducts(const HeadShape& shape, const void* x, const void* weight,
                                const TeacherHead& teacher, cudaStream_t stream) const {
  const int64_t stride = RoundUp(shape.vocab, 8);
  if (teacher.path == Path::kPortable) {
    const HeadShape teacher_shape{shape.vocab, teacher.head.hidden, teacher.head.weight_type};
    const PortableProducts products(teacher_shape, teacher.library, b_.library);
    LOSSD_CUDA_PASS_ON(
        products.Logits(logit_rows_, b_.teacher_x, teacher.head.weight, b_.teacher_logits, stride, stream));
  }
  if (path_ != Path::kPortable) return {};
  const PortableProducts products(shape, library_, b_.library);
  return products.Logits(logit_rows_, x, weight, b_.logits, stride, stream);
}

}  // namespace lossd::kernels::cuda
