#include "client/examples/train_lm/trunk.h"

#include <algorithm>
#include <cmath>

#include "client/examples/train_lm/parallel_product.h"
#include "client/examples/train_lm/random.h"

namespace lossd::train_lm {
namespace {

constexpr uint64_t kInitialValues = 1;
constexpr uint64_t kFeatureDropout = 2;
constexpr uint64_t kHiddenDropout = 3;
constexpr int64_t kRowGranularity = 16;
constexpr int64_t kColumnGranularity = 16;
constexpr double kEmbeddingDeviation = 0.1;

// Multipliers of dropout for one row: 0 with the given probability and otherwise 1 / (1 - probability).
// Drawing 16 bits each.
class Dropout {
 public:
  Dropout(double probability, Random random)
      : threshold_(static_cast<uint64_t>(std::lround(probability * 65536))),
        keep_(static_cast<float>(1 / (1 - probability))),
        random_(random) {}

  float Next() {
    if (left_ == 0) {
      bits_ = random_.Bits();
      left_ = 4;
    }
    --left_;
    const uint64_t draw = bits_ & 0xFFFFU;
    bits_ >>= 16U;
    return draw < threshold_ ? 0.0f : keep_;
  }

 private:
  uint64_t threshold_;
  float keep_;
  Random random_;
  uint64_t bits_ = 0;
  int left_ = 0;
};

// Weights of the decaying sum, of unit norm so that the sum varies as much as one embedding does.
std::vector<float> HistoryWeights(int64_t history) {
  std::vector<float> weights(static_cast<size_t>(history));
  double squares = 0;
  for (int64_t i = 0; i < history; ++i) {
    const double weight = std::exp(-3.0 * static_cast<double>(i) / static_cast<double>(history));
    weights[static_cast<size_t>(i)] = static_cast<float>(weight);
    squares += weight * weight;
  }
  for (float& weight : weights) weight = static_cast<float>(weight / std::sqrt(squares));
  return weights;
}

void AddScaled(float factor, const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

}  // namespace

Trunk::Trunk(const TrunkConfig& config, const AdamOptions& adam, ThreadPool* pool)
    : config_(config),
      pool_(pool),
      history_weights_(HistoryWeights(config.history)),
      parameters_(static_cast<size_t>(config.vocabulary * config.embedding +
                                      (FeatureCount() + 1) * 2 * config.hidden)),
      gradients_(parameters_.size()),
      adam_(static_cast<int64_t>(parameters_.size()), adam) {
  const auto cut = [this](std::vector<float>& all, std::span<float>* embeddings, std::span<float>* weight,
                          std::span<float>* bias) {
    const auto embedding_count = static_cast<size_t>(config_.vocabulary * config_.embedding);
    const auto weight_count = static_cast<size_t>(FeatureCount() * 2 * config_.hidden);
    *embeddings = std::span(all).first(embedding_count);
    *weight = std::span(all).subspan(embedding_count, weight_count);
    *bias = std::span(all).subspan(embedding_count + weight_count);
  };
  cut(parameters_, &embeddings_, &weight_, &bias_);
  cut(gradients_, &d_embeddings_, &d_weight_, &d_bias_);

  Random random(config.seed, kInitialValues);
  for (float& value : embeddings_) value = static_cast<float>(kEmbeddingDeviation * random.Normal());
  // He's deviation for the half before the relu, half of the linear one's for the skip.
  const double linear = std::sqrt(1.0 / static_cast<double>(FeatureCount()));
  for (size_t i = 0; i < weight_.size(); ++i) {
    const bool skip = static_cast<int64_t>(i) % (2 * config.hidden) >= config.hidden;
    weight_[i] = static_cast<float>((skip ? 0.5 : std::sqrt(2.0)) * linear * random.Normal());
  }
}

void Trunk::Forward(TrunkMode mode, std::span<const int32_t> text, std::span<const int64_t> positions,
                    std::span<float> hidden) {
  positions_.assign(positions.begin(), positions.end());
  features_.resize(positions.size() * static_cast<size_t>(FeatureCount()));
  sums_.resize(positions.size() * static_cast<size_t>(2 * config_.hidden));
  Gather(text, positions);
  if (mode == TrunkMode::kTraining) {
    ++forwards_;
    DropFeatures(features_);
  }
  const ProductSize size = {
      .m = static_cast<int64_t>(positions.size()), .n = 2 * config_.hidden, .k = FeatureCount()};
  Product(features_.data(), weight_.data(), sums_.data(), size, pool_);
  Activate(mode, hidden);
}

void Trunk::Gather(std::span<const int32_t> text, std::span<const int64_t> positions) {
  const int64_t width = config_.embedding;
  pool_->For(static_cast<int64_t>(positions.size()), kRowGranularity, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t position = positions[static_cast<size_t>(row)];
      float* features = features_.data() + row * FeatureCount();
      const auto embedding = [&](int64_t back) {
        return embeddings_.data() + text[static_cast<size_t>(position - back)] * width;
      };
      for (int64_t back = 1; back <= config_.context; ++back) {
        std::copy_n(embedding(back), width, features + (back - 1) * width);
      }
      float* sum = features + config_.context * width;
      std::fill_n(sum, width, 0.0f);
      for (int64_t back = 1; back <= config_.history; ++back) {
        AddScaled(history_weights_[static_cast<size_t>(back - 1)], embedding(back), sum, width);
      }
    }
  });
}

void Trunk::DropFeatures(std::span<float> features) const {
  const int64_t rows = static_cast<int64_t>(features.size()) / FeatureCount();
  pool_->For(rows, kRowGranularity, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Dropout dropout(config_.feature_dropout,
                      Random(config_.seed, kFeatureDropout, forwards_ << 32U | static_cast<uint64_t>(row)));
      for (float& value :
           features.subspan(static_cast<size_t>(row * FeatureCount()), static_cast<size_t>(FeatureCount()))) {
        value *= dropout.Next();
      }
    }
  });
}

void Trunk::Activate(TrunkMode mode, std::span<float> hidden) {
  const int64_t width = config_.hidden;
  gate_.resize(hidden.size());
  pool_->For(static_cast<int64_t>(positions_.size()), kRowGranularity, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Dropout dropout(config_.hidden_dropout,
                      Random(config_.seed, kHiddenDropout, forwards_ << 32U | static_cast<uint64_t>(row)));
      const float* before = sums_.data() + row * 2 * width;
      float* gate = gate_.data() + row * width;
      float* out = hidden.data() + row * width;
      for (int64_t i = 0; i < width; ++i) {
        const float inner = before[i] + bias_[static_cast<size_t>(i)];
        const float keep = mode == TrunkMode::kTraining ? dropout.Next() : 1.0f;
        gate[i] = inner > 0 ? keep : 0.0f;
        out[i] = gate[i] * inner + before[width + i] + bias_[static_cast<size_t>(width + i)];
      }
      out[width - 1] = 1;
    }
  });
}

void Trunk::Backward(std::span<const int32_t> text, std::span<const float> d_hidden) {
  const auto rows = static_cast<int64_t>(positions_.size());
  const int64_t width = config_.hidden;
  pool_->For(rows, kRowGranularity, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* d = d_hidden.data() + row * width;
      const float* gate = gate_.data() + row * width;
      float* d_sums = sums_.data() + row * 2 * width;
      for (int64_t i = 0; i < width; ++i) {
        d_sums[i] = d[i] * gate[i];
        d_sums[width + i] = d[i];
      }
      d_sums[width - 1] = 0;  // the constant component depends on nothing
      d_sums[2 * width - 1] = 0;
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    AddScaled(1, sums_.data() + row * 2 * width, d_bias_.data(), 2 * width);
  }
  AccumulateAt(features_.data(), sums_.data(), d_weight_.data(),
               {.m = FeatureCount(), .n = 2 * width, .k = rows}, pool_);
  ProductBt(sums_.data(), weight_.data(), features_.data(), {.m = rows, .n = FeatureCount(), .k = 2 * width},
            pool_);
  DropFeatures(features_);  // the same draws as in Forward
  Scatter(text);
}

void Trunk::Scatter(std::span<const int32_t> text) {
  const int64_t width = config_.embedding;
  // Each thread has columns of its own, so no two add to one element and the order of additions is fixed.
  pool_->For(width, kColumnGranularity, [&](int64_t begin, int64_t end) {
    for (size_t row = 0; row < positions_.size(); ++row) {
      const float* features = features_.data() + static_cast<int64_t>(row) * FeatureCount() + begin;
      const auto d_embedding = [&](int64_t back) {
        return d_embeddings_.data() + text[static_cast<size_t>(positions_[row] - back)] * width + begin;
      };
      for (int64_t back = 1; back <= config_.context; ++back) {
        AddScaled(1, features + (back - 1) * width, d_embedding(back), end - begin);
      }
      const float* sum = features + config_.context * width;
      for (int64_t back = 1; back <= config_.history; ++back) {
        AddScaled(history_weights_[static_cast<size_t>(back - 1)], sum, d_embedding(back), end - begin);
      }
    }
  });
}

void Trunk::Restore(const TrunkState& state) {
  // In place: others point into it.
  std::copy(state.parameters.begin(), state.parameters.end(), parameters_.begin());
  std::fill(gradients_.begin(), gradients_.end(), 0.0f);
  adam_.Restore(state.adam);
  forwards_ = state.forwards;
}

void Trunk::Step(double learning_rate) {
  adam_.Step(learning_rate, gradients_, parameters_, pool_);
  std::ranges::fill(gradients_, 0.0f);
}

}  // namespace lossd::train_lm
