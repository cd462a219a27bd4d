// Logits on the CPU: the product and the transform of the fused step, tile by tile, without what comes after
// them there.
#include "kernels/logits.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/constants.h"
#include "kernels/cpu/library_products.h"
#include "kernels/cpu/logit_rows.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd_products.h"
#include "kernels/cpu/workspace.h"
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

class LogitsOfTile {
 public:
  LogitsOfTile(const LogitsParams& params, const LinearCrossEntropyParams& step, const Workspace& tile,
               Products& products)
      : params_(params),
        out_(params.outputs),
        tile_(tile),
        products_(products),
        kernels_(BestSimdKernels()),
        logit_rows_(step, kernels_, tile, GradientForm::kExponentials, nullptr),
        threads_(std::min(AvailableThreads(), tile.threads)) {}

  bool Run() {
    PackRows({params_.hidden_type, params_.hidden_states, params_.hidden}, params_.weight_type, tile_,
             products_, threads_);
    ParallelFor(threads_, tile_.blocks, [this](int64_t block, int64_t thread) {
      for (int64_t begin = 0; begin < tile_.rows; begin += products_.logit_rows()) {
        const Range rows{begin, std::min(begin + products_.logit_rows(), tile_.padded_rows)};
        float* values = products_.MultiplyLogits(block, rows, tile_.Scratch(thread));
        if (values == nullptr) {
          failed_ = true;
          return;
        }
        for (int64_t r = rows.begin; r < std::min(rows.end, tile_.rows); ++r) {
          Tell(block, r, values + (r - rows.begin) * tile_.block_columns);
        }
      }
    });
    if (failed_) return false;
    for (int64_t r = 0; out_.top_k > 0 && r < tile_.rows; ++r) FinishTop(r);
    return true;
  }

 private:
  void Tell(int64_t block, int64_t r, float* values) const {
    const int64_t first = block * tile_.block_columns;
    const int64_t columns = std::min(tile_.block_columns, params_.vocab - first);
    std::array<float, kLibraryBlock> factors;
    logit_rows_.Transform(first, values, factors.data(), columns);
    if (out_.logits != nullptr) {
      const int64_t element = tile_.row_states[r].index * params_.vocab + first;
      Convert(DataType::kFloat32, values, out_.type,
              static_cast<char*>(out_.logits) + element * SizeOf(out_.type), columns);
    }
    if (out_.top_k == 0) return;
    // NaN where one of them is not finite.
    const float largest =
        CountNonFinite(DataType::kFloat32, values, columns) == 0 ? kernels_.max_row(values, columns) : kNaN;
    logit_rows_.order().Add(r, first, values, columns, largest);
    tile_.Detail(block, r).largest = largest;
    tile_.BlockValue(block, r) = kernels_.exp_row(values, columns, largest, 0);
  }

  void FinishTop(int64_t r) const {
    double largest = -std::numeric_limits<double>::infinity();
    bool finite = true;
    for (int64_t block = 0; block < tile_.blocks; ++block) {
      const float of_block = tile_.Detail(block, r).largest;
      finite = finite && std::isfinite(of_block);
      largest = std::max<double>(largest, of_block);
    }
    double sum = 0;
    for (int64_t block = 0; block < tile_.blocks; ++block) {
      sum += tile_.BlockValue(block, r) * std::exp(tile_.Detail(block, r).largest - largest);
    }
    const int64_t row = tile_.row_states[r].index;
    out_.log_sum_exp[row] = finite ? static_cast<float>(largest + std::log(sum)) : kNaN;
    for (int32_t i = 0; i < out_.top_k; ++i) {
      out_.top_tokens[row * out_.top_k + i] = finite ? tile_.top_tokens[r * kMostTopK + i] : -1;
      out_.top_logits[row * out_.top_k + i] = finite ? tile_.top_logits[r * kMostTopK + i] : kNaN;
    }
  }

  const LogitsParams& params_;
  const LogitOutputs& out_;
  const Workspace& tile_;
  Products& products_;
  const SimdKernels& kernels_;
  const LogitRows logit_rows_;
  const int64_t threads_;
  std::atomic<bool> failed_ = false;  // set by any thread
};

}  // namespace

Status RunLogits(const LogitsParams& params, Arithmetic arithmetic) {
  if (const Status status = ValidateLogits(params); status != Status::kOk) return status;
  const DataType operand =
      arithmetic == Arithmetic::kLibraryBFloat16 ? DataType::kBFloat16 : DataType::kFloat32;
  if (arithmetic != Arithmetic::kSimd && params.weight_type != operand) return Status::kUnsupported;
  const int64_t most =
      RowsWithin(params.workspace_bytes, params.vocab, params.hidden, arithmetic, RowRecord::kFull);
  if (most == 0) return Status::kWorkspaceTooSmall;
  const LinearCrossEntropyParams step = AsStep(params);
  const WeightMatrix weight{params.weight_type, params.weight, params.vocab, params.hidden};
  for (int64_t first = 0; first < params.rows; first += most) {
    Workspace tile;
    LayOut(std::min(most, params.rows - first), params.vocab, params.hidden, arithmetic, RowRecord::kFull,
           params.workspace, &tile);
    for (int64_t r = 0; r < tile.rows; ++r) {
      tile.row_states[r] = RowState{.index = first + r};
      tile.row_details[r] = RowDetail{};
    }
    bool done = false;
    if (arithmetic == Arithmetic::kSimd) {
      SimdProducts products(BestSimdKernels(), weight, tile);
      done = LogitsOfTile(params, step, tile, products).Run();
    } else {
      LibraryProducts products(weight, tile);
      done = LogitsOfTile(params, step, tile, products).Run();
    }
    if (!done) return Status::kInternal;
  }
  return Status::kOk;
}

}  // namespace cpu

Status CpuLogits(const LogitsParams& params) {
  return cpu::RunLogits(params, cpu::BestArithmetic(params.weight_type));
}

}  // namespace lossd::kernels
