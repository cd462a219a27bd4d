// Logits on the CPU: the product and the transform of the fused step, tile by tile, without what comes after
// them there.
#include "kernels/logits.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/constants.h"
#include "kernels/cpu/logit_rows.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_order.h"
#include "kernels/cpu/segments/logit_sums.h"
#include "kernels/cpu/segments/segment.h"
#include "kernels/cpu/segments/shard_exchange.h"
#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/cpu/tile_memory.h"
#include "kernels/segment_tree.h"
#include "kernels/validate.h"

namespace lossd::kernels {
namespace cpu {
namespace {

// The parameters of a fused step with the same products.
LinearCrossEntropyParams AsStep(const LogitsParams& params) {
  LinearCrossEntropyParams step;
  step.tokens = params.rows;
  step.vocab = params.vocab;
  step.hidden = params.hidden;
  step.weight_type = params.weight_type;
  step.weight = params.weight;
  step.bias = params.bias;
  step.options.logit_scale = params.logit_scale;
  step.options.softcap = params.softcap;
  step.returns.top_k = params.outputs.top_k;
  return step;
}

// Where whole logits go: to the caller, or at a rank that does not answer to where they are sent from.
struct LogitRowsOut {
  char* data = nullptr;  // null: they are not wanted
  DataType type = DataType::kFloat32;
  int64_t stride = 0;  // elements between rows
  int64_t first = 0;   // what they begin with, in the whole vocabulary

  char* At(int64_t r, int64_t entry) const { return data + (r * stride + entry - first) * SizeOf(type); }
};

// One segment's logits of a tile.
class SegmentLogits {
 public:
  SegmentLogits(Segment& segment, const LogitRowsOut& out)
      : segment_(segment),
        out_(out),
        tile_(segment.tile()),
        kernels_(BestSimdKernels()),
        logit_rows_(segment.params(), kernels_, tile_, GradientForm::kExponentials, nullptr),
        threads_(std::min(AvailableThreads(), tile_.threads)) {}

  bool Compute() {
    Products& products = segment_.products();
    ParallelFor(threads_, tile_.blocks, [&](int64_t block, int64_t thread) {
      for (int64_t begin = 0; begin < tile_.rows; begin += products.logit_rows()) {
        const Range rows{begin, std::min(begin + products.logit_rows(), tile_.padded_rows)};
        float* values = products.MultiplyLogits(block, rows, tile_.Scratch(thread));
        if (values == nullptr) {
          failed_ = true;
          return;
        }
        for (int64_t r = rows.begin; r < std::min(rows.end, tile_.rows); ++r) {
          Tell(block, r, values + (r - rows.begin) * tile_.block_columns);
        }
      }
    });
    return !failed_;
  }

  LogitSums Sums(int64_t r) const {
    LogitSums sums;
    for (int64_t block = 0; block < tile_.blocks; ++block) {
      const float of_block = tile_.Detail(block, r).largest;
      sums.finite = sums.finite && of_block < kInfinity;
      sums.largest = std::max<double>(sums.largest, of_block);
    }
    for (int64_t block = 0; block < tile_.blocks; ++block) {
      const double of_block = tile_.BlockValue(block, r);
      if (of_block > 0) sums.sum += of_block * std::exp(tile_.Detail(block, r).largest - sums.largest);
    }
    return sums;
  }

 private:
  void Tell(int64_t block, int64_t r, float* values) const {
    const int64_t first = block * tile_.block_columns;
    const int64_t columns = std::min(tile_.block_columns, segment_.params().vocab - first);
    std::array<float, kLibraryBlock> factors;
    logit_rows_.Transform(first, values, factors.data(), columns);
    if (out_.data != nullptr) {
      Convert(DataType::kFloat32, values, out_.type, out_.At(r, segment_.first() + first), columns);
    }
    if (segment_.params().returns.top_k == 0) return;
    const float largest = kernels_.max_row(values, columns);
    logit_rows_.order().Add(r, first, values, columns, largest);
    tile_.Detail(block, r).largest = largest;
    tile_.BlockValue(block, r) = std::isfinite(largest) ? kernels_.exp_row(values, columns, largest, 0) : 0.0;
  }

  Segment& segment_;
  const LogitRowsOut& out_;
  const Workspace& tile_;
  const SimdKernels& kernels_;
  const LogitRows logit_rows_;
  const int64_t threads_;
  std::atomic<bool> failed_ = false;  // set by any thread
};

// Logits of a batch, tile by tile.
class BatchLogits {
 public:
  BatchLogits(const LogitsParams& params, Arithmetic arithmetic)
      : params_(params),
        out_(params.outputs),
        arithmetic_(arithmetic),
        step_(AsStep(params)),
        vocabulary_(params.shard, params.vocab),
        exchange_(vocabulary_),
        segments_(step_, vocabulary_),
        staged_row_bytes_(exchange_.is_alone() ? 0 : StagedRowBytes(vocabulary_.shard())) {}

  Status Run() {
    tile_ = LargestTile(params_.workspace_bytes, {1, params_.hidden, arithmetic_, RowRecord::kFull},
                        vocabulary_.shard(), staged_row_bytes_);
    int64_t most = tile_.rows;
    if (const Status status = exchange_.AgreeOnRows(&most); status != Status::kOk) return status;
    if (most == 0) return Status::kWorkspaceTooSmall;
    for (int64_t first = 0; first < params_.rows; first += most) {
      TakeRows(first, std::min(most, params_.rows - first));
      const Status status = ProcessTile(first);
      if (status == Status::kInternal) exchange_.GiveUp();
      if (status != Status::kOk) return status;
    }
    return Status::kOk;
  }

 private:
  void TakeRows(int64_t first, int64_t count) {
    TileSize size = tile_;
    size.rows = count;
    LayOut(size, segments_.entries(), {exchange_.is_alone() ? 0 : vocabulary_.segments(), staged_row_bytes_},
           params_.workspace, &memory_);
    for (size_t i = 0; i < segments_.all().size(); ++i) {
      const Workspace& tile = memory_.segments[i];
      for (int64_t r = 0; r < count; ++r) {
        tile.row_states[r] = RowState{.index = first + r};
        tile.row_details[r] = RowDetail{};
      }
      segments_.all()[i].BindProducts(arithmetic_, tile);
    }
  }

  LogitRowsOut OutOf(int64_t first) const {
    if (out_.logits == nullptr) return {};
    const int64_t vocab = vocabulary_.entries();
    if (vocabulary_.answers()) {
      return {static_cast<char*>(out_.logits) + first * vocab * SizeOf(out_.type), out_.type, vocab, 0};
    }
    return {memory_.exchange.staged, out_.type, params_.vocab, vocabulary_.shard().first()};
  }

  Status ProcessTile(int64_t first) {
    const std::span<Segment> segments = segments_.all();
    const int64_t threads = std::min(AvailableThreads(), segments[0].tile().threads);
    PackRows({params_.hidden_type, params_.hidden_states, params_.hidden}, params_.weight_type,
             segments[0].tile(), segments[0].products(), threads);
    const LogitRowsOut out = OutOf(first);
    PerSegment<std::optional<SegmentLogits>> logits;
    for (size_t i = 0; i < segments.size(); ++i) {
      if (!logits[i].emplace(segments[i], out).Compute()) return Status::kInternal;
    }
    if (out_.logits != nullptr) {
      if (const Status status = ExchangeLogits(out); status != Status::kOk) return status;
    }
    return out_.top_k == 0 ? Status::kOk : FinishTops(logits);
  }

  // Every rank's entries of the tile's rows go to the rank that answers, which puts them into their places.
  Status ExchangeLogits(const LogitRowsOut& out) {
    if (exchange_.is_alone()) return Status::kOk;
    const Shard& shard = vocabulary_.shard();
    const int64_t rows = memory_.segments[0].rows;
    const auto first_of = [this](int32_t rank) {
      return vocabulary_.FirstEntry(vocabulary_.FirstSegment(rank));
    };
    PerSegment<int64_t> bytes{};
    for (int32_t rank = 0; rank < shard.ranks(); ++rank) {
      if (rank == shard.answering_rank) continue;
      bytes[static_cast<size_t>(rank)] = rows * (first_of(rank + 1) - first_of(rank)) * SizeOf(out_.type);
    }
    char* staged = memory_.exchange.staged;
    const Status status = exchange_.SendToAnswering(Exchange::kRows, vocabulary_.answers() ? nullptr : staged,
                                                    bytes, vocabulary_.answers() ? staged : nullptr);
    if (status != Status::kOk || !vocabulary_.answers()) return status;
    for (int32_t rank = 0; rank < shard.ranks(); ++rank) {
      const int64_t row_bytes = bytes[static_cast<size_t>(rank)] / rows;
      for (int64_t r = 0; row_bytes > 0 && r < rows; ++r, staged += row_bytes) {
        std::memcpy(out.At(r, first_of(rank)), staged, static_cast<size_t>(row_bytes));
      }
    }
    return Status::kOk;
  }

  Status FinishTops(const PerSegment<std::optional<SegmentLogits>>& logits) {
    const int64_t rows = memory_.segments[0].rows;
    const auto segments = static_cast<size_t>(vocabulary_.segments());
    if (!exchange_.is_alone()) {
      if (const Status status = GatherTops(logits); status != Status::kOk) return status;
    }
    for (int64_t r = 0; vocabulary_.answers() && r < rows; ++r) {
      PerSegment<LogitSums> sums;
      std::array<TopEntry, kMostTopK> top;
      top.fill({});
      for (size_t i = 0; i < segments; ++i) {
        const int64_t at = static_cast<int64_t>(i) * rows + r;
        std::array<TopEntry, kMostTopK> own;
        if (exchange_.is_alone()) CopyTop(i, r, own.data());
        MergeTop(exchange_.is_alone() ? own.data() : memory_.exchange.top + at * out_.top_k, out_.top_k,
                 top.data());
        sums[i] = exchange_.is_alone() ? logits[i]->Sums(r) : memory_.exchange.logit_sums[at];
      }
      WriteTop(memory_.segments[0].row_states[r].index, Merge(std::span(sums).first(segments)), top.data());
    }
    return Status::kOk;
  }

  Status GatherTops(const PerSegment<std::optional<SegmentLogits>>& logits) {
    const int64_t rows = memory_.segments[0].rows;
    for (size_t i = 0; i < segments_.all().size(); ++i) {
      const int64_t segment = vocabulary_.first_segment() + static_cast<int64_t>(i);
      for (int64_t r = 0; r < rows; ++r) {
        memory_.exchange.logit_sums[segment * rows + r] = logits[i]->Sums(r);
        CopyTop(i, r, memory_.exchange.top + (segment * rows + r) * out_.top_k);
      }
    }
    const Status status = exchange_.GatherSegments(memory_.exchange.logit_sums, rows);
    return status != Status::kOk ? status : exchange_.GatherSegments(memory_.exchange.top, rows * out_.top_k);
  }

  void CopyTop(size_t segment, int64_t r, TopEntry* to) {
    cpu::CopyTop(memory_.segments[segment], r, segments_.all()[segment].first(), out_.top_k, to);
  }

  void WriteTop(int64_t row, const LogitSums& sums, const TopEntry* top) const {
    out_.log_sum_exp[row] = sums.finite ? static_cast<float>(sums.largest + std::log(sums.sum)) : kNaN;
    for (int32_t i = 0; i < out_.top_k; ++i) {
      out_.top_tokens[row * out_.top_k + i] = sums.finite ? top[i].token : -1;
      out_.top_logits[row * out_.top_k + i] = sums.finite ? top[i].logit : kNaN;
    }
  }

  const LogitsParams& params_;
  const LogitOutputs& out_;
  const Arithmetic arithmetic_;
  const LinearCrossEntropyParams step_;
  const Vocabulary vocabulary_;
  const ShardExchange exchange_;
  LocalSegments segments_;
  const int64_t staged_row_bytes_;
  TileSize tile_;  // the largest
  TileMemory memory_;
};

}  // namespace

Status RunLogits(const LogitsParams& params, Arithmetic arithmetic) {
  if (const Status status = ValidateLogits(params); status != Status::kOk) return status;
  const DataType operand =
      arithmetic == Arithmetic::kLibraryBFloat16 ? DataType::kBFloat16 : DataType::kFloat32;
  if (arithmetic != Arithmetic::kSimd && params.weight_type != operand) return Status::kUnsupported;
  return BatchLogits(params, arithmetic).Run();
}

}  // namespace cpu

Status CpuLogits(const LogitsParams& params) {
  return cpu::RunLogits(params, cpu::BestArithmetic(params.weight_type));
}

}  // namespace lossd::kernels
