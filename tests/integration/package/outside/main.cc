// Uses every part of the installed client once: outside HOST:PORT
#include <lossd/client.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int64_t kVocab = 50;
constexpr int64_t kHidden = 8;
constexpr int64_t kTokens = 20;

int Fail(const char* step, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", step, status.ToString().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  auto client = lossd::Client::Connect(argv[1], {});
  if (!client.ok()) return Fail("Connect", client.status());
  auto head = (*client)->CreateHead({.name = "outside",
                                     .vocab_size = kVocab,
                                     .hidden_size = kHidden,
                                     .weight_type = lossd::DataType::kFloat32});
  if (!head.ok()) return Fail("CreateHead", head.status());
  const std::vector<float> weights(kVocab * kHidden, 0.0F);
  if (auto version = head->WriteWeights(lossd::DataType::kFloat32, weights.data()); !version.ok()) {
    return Fail("WriteWeights", version.status());
  }
  auto session = head->OpenSession({});
  if (!session.ok()) return Fail("OpenSession", session.status());

  // Without weights every logit is 0: each loss is log V, and dW[v] = sum over tokens of (1/V - [v = label])
  // x.
  std::vector<int64_t> labels(kTokens);
  for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<int64_t>(i) % 7;
  const std::vector<float> hidden(kTokens * kHidden, 1.0F);
  std::vector<float> losses(kTokens);
  std::vector<float> dx(kTokens * kHidden);
  const auto result = session->Compute({.labels = labels, .hidden_states = hidden.data()},
                                       {.losses = losses, .dx = dx.data()});
  if (!result.ok()) return Fail("Compute", result.status());

  std::vector<float> gradient(kVocab * kHidden);
  const lossd::SessionMarks marks = session->marks();
  const auto flushed = head->Flush({}, {&marks, 1}, gradient.data());
  if (!flushed.ok()) return Fail("Flush", flushed.status());

  const double loss = result->loss_sum / static_cast<double>(result->valid_tokens);
  const double expected_loss = std::log(static_cast<double>(kVocab));
  const double label_0 = static_cast<double>(kTokens) / kVocab - 3;  // tokens 0, 7 and 14
  std::printf("loss %.6f (log V = %.6f), dW[0][0] %.6f (%.6f)\n", loss, expected_loss,
              static_cast<double>(gradient[0]), label_0);
  return std::fabs(loss - expected_loss) < 1e-5 &&
                 std::fabs(static_cast<double>(gradient[0]) - label_0) < 1e-4
             ? 0
             : 1;
}
