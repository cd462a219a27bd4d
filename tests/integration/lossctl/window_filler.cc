// A trainer for tests of the command-line tool: gives a head work and looks at its window.
//
//   window_filler SERVER HEAD feed TOKENS   sends seeded tokens, every 7th of them ignored
//   window_filler SERVER HEAD peek FILE     writes dW and, with a bias, db, fp32 and raw, and reopens the
//   window window_filler SERVER HEAD freeze        freezes the window and goes away, like a flush that was
//   killed
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "lossd/client.h"

namespace {

using lossd::Head;

absl::Status Feed(const Head& head, const std::string& count) {
  int64_t tokens = 0;
  if (!absl::SimpleAtoi(count, &tokens)) return absl::InvalidArgumentError(count);
  const int64_t vocab = head.config().vocab_size;
  const int64_t hidden = head.config().hidden_size;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> states(static_cast<size_t>(tokens * hidden));
  for (float& value : states) value = normal(random);
  std::vector<int64_t> labels(static_cast<size_t>(tokens));
  for (size_t i = 0; i < labels.size(); ++i) {
    labels[i] = i % 7 == 0 ? -100 : static_cast<int64_t>(random() % vocab);
  }

  auto session = head.OpenSession({});
  if (!session.ok()) return session.status();
  const lossd::Batch batch{.labels = labels,
                           .hidden_type = lossd::DataType::kFloat32,
                           .hidden_states = states.data(),
                           .gradient_scale = 1.0f / static_cast<float>(tokens)};
  auto result = session->Compute(batch, {});
  if (!result.ok()) return result.status();
  std::printf("%lld\n", static_cast<long long>(result->valid_tokens));
  return session->Close();
}

absl::StatusOr<std::string> Freeze(const Head& head, std::vector<float>& gradient) {
  auto info = head.Info();
  if (!info.ok()) return info.status();
  gradient.resize(static_cast<size_t>(head.config().vocab_size * head.config().hidden_size));
  lossd::FlushOptions options;
  options.commit = false;
  std::vector<float> bias(static_cast<size_t>(head.config().bias ? head.config().vocab_size : 0));
  auto flush = head.Flush(options, info->sessions, gradient.data(), bias);
  if (!flush.ok()) return flush.status();
  gradient.insert(gradient.end(), bias.begin(), bias.end());
  return flush->flush_id;
}

absl::Status Peek(const Head& head, const std::string& path) {
  std::vector<float> gradient;
  auto flush_id = Freeze(head, gradient);
  if (!flush_id.ok()) return flush_id.status();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(gradient.data()),
             static_cast<std::streamsize>(gradient.size() * sizeof(float)));
  return head.AbortFlush(*flush_id);
}

absl::Status Run(const std::vector<std::string>& arguments) {
  if (arguments.size() < 3) return absl::InvalidArgumentError("SERVER HEAD ACTION");
  auto client = lossd::Client::Connect(arguments[0], {});
  if (!client.ok()) return client.status();
  auto head = (*client)->GetHead(arguments[1]);
  if (!head.ok()) return head.status();
  const std::string& action = arguments[2];
  if (action == "feed" && arguments.size() == 4) return Feed(*head, arguments[3]);
  if (action == "peek" && arguments.size() == 4) return Peek(*head, arguments[3]);
  if (action == "freeze") {
    std::vector<float> gradient;
    return Freeze(*head, gradient).status();
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown action ", action));
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Run({argv + 1, argv + argc});
  if (!status.ok()) std::fprintf(stderr, "window_filler: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
