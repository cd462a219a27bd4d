// What simulated trainers compute, and the sequential oracle: plain sums of it. All numbers are small
// integers, so that no sum depends on its order.
#ifndef LOSSD_TESTS_SIMULATION_WORKLOAD_H_
#define LOSSD_TESTS_SIMULATION_WORKLOAD_H_

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/engine/chunk/chunk.h"

namespace lossd::simulation {

inline constexpr int64_t kVocab = 8;
inline constexpr int64_t kHidden = 4;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int Below(int limit) { return static_cast<int>(engine_() % static_cast<uint64_t>(limit)); }
  bool OneIn(int times) { return Below(times) == 0; }

 private:
  std::mt19937_64 engine_;
};

// A gradient, or weights, with its bias.
struct Values {
  std::vector<float> matrix = std::vector<float>(kVocab * kHidden);
  std::vector<float> bias = std::vector<float>(kVocab);
  int64_t tokens = 0;  // of a gradient

  bool operator==(const Values& other) const { return matrix == other.matrix && bias == other.bias; }
  // += factor * other
  void Add(const Values& other, float factor = 1);
};

enum class ItemKind { kGood, kRefused, kLossOnly };

// The content of one chunk.
struct Item {
  uint64_t number = 0;
  ItemKind kind = ItemKind::kGood;
  float scale = 1;
  bool dx = true;  // whether it is wanted; of losses only there is none
  std::vector<int64_t> labels;
  std::vector<float> hidden_states;

  int64_t tokens() const { return static_cast<int64_t>(labels.size()); }
  // What it adds to the gradient: nothing if it is refused, or of losses only.
  void AddTo(Values* gradient) const;
  // What it answers with these weights.
  std::vector<float> Losses(const Values& weights) const;
  std::vector<float> InputGradients(const Values& weights) const;
};

Item MakeItem(uint64_t number, Random* random);
// The same without gradients.
Item LossOnly(Item item);
// The same with labels that are in range.
Item Corrected(Item item);
// Labels of a chunk that are ignored have a number of their own, by which a device knows the item; nothing
// for any other number.
std::optional<uint64_t> ItemOf(int64_t ignored_label);
engine::Chunk ToChunk(const Item& item, uint64_t sequence, uint64_t generation);

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_WORKLOAD_H_
