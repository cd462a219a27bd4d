// The same training run twice, side by side: once with the head in a lossd server (whose address is the only
// argument), once with the head in this process. Losses and held-out perplexity must follow each other, for
// both kinds of head.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/examples/train_lm/local_head.h"
#include "client/examples/train_lm/random.h"
#include "client/examples/train_lm/remote_head.h"
#include "client/examples/train_lm/trainer.h"

namespace lossd::train_lm {
namespace {

std::string server_address;  // NOLINT(runtime/string): set once, before the tests run

// Sentences of a small random grammar: enough structure for the loss to fall fast.
Document Sentences() {
  const std::vector<std::string> words = {"server",  "client", "gradient", "window", "weight", "token",
                                          "session", "chunk",  "stream",   "lane",   "mark",   "head"};
  const std::vector<std::string> verbs = {"sends", "reads", "flushes", "adds", "names", "keeps"};
  Random random(11, 0);
  const auto pick = [&](const std::vector<std::string>& from) { return from[random.Below(from.size())]; };
  std::string text;
  for (int i = 0; i < 1500; ++i) {
    absl::StrAppend(&text, "The ", pick(words), " ", pick(verbs), " the ", pick(words), " of ",
                    random.Below(50), " and the ", pick(words), " ", pick(verbs), " it.\n\n");
  }
  return ParseDocument("sentences", text);
}

struct Case {
  HeadPrecision precision;
  double loss_tolerance;  // relative
};

class TwinTest : public ::testing::TestWithParam<Case> {};

TEST_P(TwinTest, FollowsTheLossesOfTheServer) {
  const std::vector<Document> documents = {Sentences()};
  const absl::StatusOr<TextData> data = PrepareText(documents, {.vocabulary = 300, .padding = 8});
  ASSERT_TRUE(data.ok()) << data.status();
  TrainerOptions options;
  options.steps = 40;
  options.batch = 600;
  options.accumulate = 2;
  options.learning_rate = 0.01;
  options.seed = 5;
  options.trunk.hidden = 64;
  options.trunk.embedding = 32;
  options.trunk.context = 4;
  options.trunk.history = 8;
  const HeadShape shape = {.vocabulary = data->vocabulary, .hidden = options.trunk.hidden};

  ThreadPool pool(2);
  const absl::StatusOr<std::unique_ptr<RemoteHead>> remote_head = RemoteHead::Open(
      server_address, tools::ConnectionOptions(),
      absl::StrCat("twin-", GetParam().precision == HeadPrecision::kFloat32 ? "fp32" : "bf16"), shape,
      GetParam().precision, options.adam(), HeadLifetime::kUntilClosed);
  ASSERT_TRUE(remote_head.ok()) << remote_head.status();
  LocalHead local_head(shape, GetParam().precision, options.adam(), &pool);
  Trainer remote(options, *data, remote_head->get(), &pool);
  Trainer local(options, *data, &local_head, &pool);
  ASSERT_TRUE(remote.Start().ok());
  ASSERT_TRUE(local.Start().ok());

  const HeadTraffic before = (*remote_head)->Traffic();
  double first = 0;
  double last = 0;
  double worst = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    const absl::StatusOr<double> remote_loss = remote.Step();
    const absl::StatusOr<double> local_loss = local.Step();
    ASSERT_TRUE(remote_loss.ok()) << remote_loss.status();
    ASSERT_TRUE(local_loss.ok()) << local_loss.status();
    ASSERT_NEAR(*remote_loss, *local_loss, GetParam().loss_tolerance * *local_loss) << "step " << step;
    worst = std::max(worst, std::abs(*remote_loss / *local_loss - 1));
    if (step == 0) first = *remote_loss;
    last = *remote_loss;
  }
  // Hidden states one way, dX the other, and little else: no tensor of the weights' shape.
  const HeadTraffic after = (*remote_head)->Traffic();
  const int64_t states = options.steps * options.batch * options.accumulate * shape.hidden * 4;
  const int64_t rest = options.steps * (options.batch * options.accumulate * 12 + 4096);
  EXPECT_LT(after.sent - before.sent, states + rest);
  EXPECT_LT(after.received - before.received, states + rest);
  EXPECT_LT(rest, options.steps * shape.Elements() * 2) << "or weights in bf16 would go unnoticed";
  // Far more than the tolerance, or agreement would mean nothing: a lost dW or dX shows here and above.
  EXPECT_LT(last, 0.6 * first);
  const absl::StatusOr<double> remote_perplexity = remote.HeldOutPerplexity();
  const absl::StatusOr<double> local_perplexity = local.HeldOutPerplexity();
  ASSERT_TRUE(remote_perplexity.ok()) << remote_perplexity.status();
  EXPECT_NEAR(std::log(*remote_perplexity), std::log(*local_perplexity),
              GetParam().loss_tolerance * std::log(*local_perplexity));
  std::cout << "losses " << first << " to " << last << ", largest relative difference " << worst << '\n';
}

// One step of an fp32 head differs by the order of fp32 additions, about 1e-7. For bf16 there is also the
// rounding of the logits' gradient, which servers with bf16 instructions do and the twin does not: 2^-9 in
// each element, independently. AdamW amplifies both a little from step to step.
INSTANTIATE_TEST_SUITE_P(Heads, TwinTest,
                         ::testing::Values(Case{HeadPrecision::kFloat32, 1e-5},
                                           Case{HeadPrecision::kBFloat16, 5e-3}),
                         [](const auto& test) {
                           return test.param.precision == HeadPrecision::kFloat32 ? "Float32" : "BFloat16";
                         });

}  // namespace
}  // namespace lossd::train_lm

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::cerr << "usage: train_lm_twin_test HOST:PORT\n";
    return 2;
  }
  lossd::train_lm::server_address = argv[1];
  return RUN_ALL_TESTS();
}
