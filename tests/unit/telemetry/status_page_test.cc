#include "server/telemetry/status_page/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/time/clock.h"
#include "server/engine/common/random_id.h"

namespace lossd::telemetry::status_page_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kEvil[] = "<script>alert(\"1\")</script>&'";
constexpr char kHarmless[] = "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;";

ServerStatus Example() {
  const absl::Time now = absl::FromUnixSeconds(1'700'000'000);
  ServerStatus status;
  status.now = now;
  status.version = "1.2.3";
  status.device = "cuda:0";
  status.device_description = "a GPU";
  status.incarnation = "one-of-many";
  status.started = now - absl::Hours(3);
  HeadStatus head;
  head.name = "english";
  head.vocab_size = 32768;
  head.hidden_size = 4096;
  head.weight_type = "bfloat16";
  head.snapshot.generation = 17;
  head.snapshot.weight_version = 5;
  head.snapshot.window_state = engine::WindowState::kSealed;
  head.snapshot.window_tokens = 4321;
  head.snapshot.window_since = now - absl::Seconds(90);
  head.snapshot.flush_since = now - absl::Seconds(7);
  head.tokens = 10;
  head.loss_tokens = 10;
  head.loss = 2.75;
  head.gradient_norm = 0.125;
  head.memory = {{"weights", int64_t{3} << 30, engine::MemoryPlace::kDevice}};
  engine::SessionSnapshot& session = head.sessions.emplace_back();
  session.number = 4;
  session.rank = 2;
  session.lanes = 8;
  session.streams = 7;
  session.idle = absl::Seconds(2);
  status.heads.push_back(head);
  status.memory = head.memory;
  status.memory_limit = int64_t{12} << 30;
  status.memory_reserved = int64_t{3} << 30;
  status.device_memory = {int64_t{80} << 30, int64_t{60} << 30};
  status.pinned_pool = {1 << 20, 1 << 19, 1 << 19};
  status.throughput.rates.tokens = 45'678;
  status.throughput.tokens_per_second = {1, 2, 4};
  status.calls = {{"LossService/Compute", 7}};
  status.errors = {
      {now, "HeadService/DeleteHead", 5, "head 'x' does not exist", "0af7651916cd43dd8448eb211c80319c"}};
  return status;
}

TEST(StatusPage, ShowsWhatThereIs) {
  const std::string page = StatusPage(Example()).body;
  for (const char* text : {"lossd 1.2.3",
                           "serving",
                           "a GPU",
                           "up 3 h 0 min",
                           "one-of-many",
                           "english",
                           "32768 × 4096",
                           "bfloat16",
                           ">17<",
                           ">5<",
                           "frozen</span> 7.0 s",
                           "4,321",
                           "1 min 30 s",
                           "2.75",
                           "0.125",
                           "45.7 k",
                           "weights (device) 3.0 GiB",
                           "3.0 GiB of 12.0 GiB",
                           "20.0 GiB of 80.0 GiB",
                           "pinned pool",
                           "7 of 8",
                           "2.0 s",
                           "LossService/Compute",
                           "NOT_FOUND",
                           "head &#39;x&#39; does not exist",
                           "0af7651916cd43dd8448eb211c80319c"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
  EXPECT_THAT(page, HasSubstr("<rect class=\"p0\" x=\"0.00\" width=\"250.00\" height=\"10\"/>"))
      << "a quarter of the bar";
}

ServerStatus OfAGroup() {
  ServerStatus status = Example();
  status.group.epoch = 3;
  status.group.patience = absl::Seconds(60);
  status.group.ranks.resize(2);
  engine::RankReport& rank = status.group.ranks[1];
  rank.device = "cuda:1";
  rank.pci_bus_id = "00000000:1b:00.0";
  rank.host = "node-1";
  rank.memory_limit = int64_t{12} << 30;
  rank.memory.reserved = int64_t{5} << 30;
  rank.totals = {int64_t{80} << 30, int64_t{50} << 30};
  rank.activity.uptime_seconds = 200;
  engine::DurationHistogram waits;
  waits.Observe(50);
  rank.activity.waits[static_cast<size_t>(kernels::Exchange::kRowStatistics)] = waits.Read();
  return status;
}

TEST(StatusPage, ShowsTheRanksOfAGroup) {
  EXPECT_THAT(StatusPage(Example()).body, Not(HasSubstr("Ranks")));
  const std::string page = StatusPage(OfAGroup()).body;
  for (const char* text : {"Ranks, epoch 3", ">node-1<", "cuda:1, 00000000:1b:00.0", "5.0 GiB of 12.0 GiB",
                           "30.0 GiB of 80.0 GiB", "50.0 s (25.0 %)"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
}

TEST(StatusPage, NamesTheRankThatIsStuckAndItsCommand) {
  ServerStatus status = OfAGroup();
  engine::RankActivity& activity = status.group.ranks[1].activity;
  activity.command = "StartBatch";
  activity.command_seconds = 61;
  EXPECT_THAT(StatusPage(status).body, HasSubstr("not ready: a rank is stuck"));
  EXPECT_THAT(StatusPage(status).body, HasSubstr(">stuck</span> StartBatch 1 min 1 s"));
  activity.waits_at = kernels::Exchange::kRowStatistics;
  EXPECT_THAT(StatusPage(status).body, HasSubstr("row_statistics"));
  activity.command_seconds = 59;
  EXPECT_THAT(StatusPage(status).body, Not(HasSubstr("stuck")));
  EXPECT_THAT(StatusPage(status).body, HasSubstr("StartBatch 59.0 s"));
}

TEST(StatusJson, HasTheRanksOfAGroup) {
  EXPECT_TRUE(nlohmann::json::parse(StatusJson(Example()))["group"].is_null());
  const auto group = nlohmann::json::parse(StatusJson(OfAGroup()))["group"];
  EXPECT_EQ(group["epoch"], 3);
  ASSERT_EQ(group["ranks"].size(), 2u);
  EXPECT_EQ(group["ranks"][1]["device"], "cuda:1");
  EXPECT_EQ(group["ranks"][1]["reserved_bytes"], int64_t{5} << 30);
  EXPECT_EQ(group["ranks"][1]["waited_seconds"]["row_statistics"], 50);
  EXPECT_TRUE(group["ranks"][1]["command"].is_null());
  EXPECT_EQ(group["ranks"][1]["stuck"], false);
}

ServerStatus OfASet() {
  ServerStatus status = Example();
  engine::ReplicaReport& set = status.replicas;
  set.name = "lm";
  set.place = {.replica = 0, .replicas = 2};
  set.epochs = 3;
  set.returns = 1;
  set.replicas.resize(2);
  set.replicas[1].sessions_placed = 4;
  set.replicas[1].late_seconds = {0.0125, 0, 0.002, 0};
  return status;
}

TEST(StatusPage, ShowsHowLateEachReplicaAnswers) {
  EXPECT_THAT(StatusPage(Example()).body, Not(HasSubstr("eplica")));
  const std::string page = StatusPage(OfASet()).body;
  for (const char* text : {"replica 0 of 2", "Replicas, set lm", ">all are there<", "met 3 times",
                           "went back to a checkpoint 1 times", "data-name=\"sessions placed\">4<",
                           "data-name=\"late to seal\">12.5 ms<", "data-name=\"late to step\">2.0 ms<"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
}

TEST(StatusPage, SaysInRedWhichReplicaIsMissing) {
  ServerStatus status = OfASet();
  EXPECT_THAT(StatusPage(status).body, Not(HasSubstr("badge bad\">replica")));
  status.replicas.whole = absl::UnavailableError("replica <1> of 2 did not join");
  const std::string page = StatusPage(status).body;
  EXPECT_THAT(page, HasSubstr("badge bad\">replica 0 of 2: not all are there<"));
  EXPECT_THAT(page, HasSubstr("badge bad\">no window ends</span> replica &lt;1&gt; of 2 did not join"));
  EXPECT_THAT(page, HasSubstr("badge good\">serving<")) << "chunks, losses and logits go on";
}

TEST(StatusPage, SaysInRedWhichReplicaDoesNotAnswer) {
  ServerStatus status = OfASet();
  EXPECT_THAT(StatusPage(status).body, Not(HasSubstr("no window ends")));
  status.replicas.waits_for = "replica 1 has not answered a step for 41 s";
  const std::string page = StatusPage(status).body;
  EXPECT_THAT(page, HasSubstr("all are there"));
  EXPECT_THAT(page,
              HasSubstr("badge bad\">no window ends</span> replica 1 has not answered a step for 41 s"));
  EXPECT_EQ(nlohmann::json::parse(StatusJson(status))["replicas"]["why_not"], status.replicas.waits_for);
}

TEST(StatusJson, HasTheSetOfReplicas) {
  EXPECT_TRUE(nlohmann::json::parse(StatusJson(Example()))["replicas"].is_null());
  ServerStatus status = OfASet();
  status.replicas.whole = absl::UnavailableError("replica 1 of 2 did not join");
  const auto set = nlohmann::json::parse(StatusJson(status))["replicas"];
  EXPECT_EQ(set["name"], "lm");
  EXPECT_EQ(set["whole"], false);
  EXPECT_EQ(set["why_not"], "replica 1 of 2 did not join");
  EXPECT_EQ(set["members"][1]["late_seconds"]["seal"], 0.0125);
}

TEST(StatusPage, SaysThatTheServerDrains) {
  ServerStatus status = Example();
  EXPECT_THAT(StatusPage(status).body, Not(HasSubstr(">draining<")));
  status.serving = false;
  EXPECT_THAT(StatusPage(status).body, HasSubstr(">starting<"));
  status.draining = true;
  EXPECT_THAT(StatusPage(status).body, HasSubstr(">draining<"));
}

TEST(StatusPage, NamesTheHeadsThatAreParked) {
  ServerStatus status = Example();
  EXPECT_THAT(StatusPage(status).body, Not(HasSubstr("Parked")));
  status.parked = {{kEvil, int64_t{3} << 29}};
  const std::string line = std::string("Parked in the host's memory, until they are used: ") + kHarmless;
  EXPECT_THAT(StatusPage(status).body, HasSubstr(line + " (1.5 GiB)"));
  status.heads.clear();
  EXPECT_THAT(StatusPage(status).body, HasSubstr("There are none on the device."));
  EXPECT_THAT(StatusPage(status).body, HasSubstr(line));
}

TEST(StatusPage, AnEmptyServerHasAPageToo) {
  EXPECT_THAT(StatusPage({}).body, HasSubstr("There are none yet."));
}

TEST(StatusPage, NothingThatAClientChoosesBecomesMarkup) {
  ServerStatus status = Example();
  status.heads[0].name = kEvil;
  status.heads[0].memory[0].purpose = kEvil;
  status.heads[0].weight_type = kEvil;
  status.memory[0].purpose = kEvil;
  status.calls[0].method = kEvil;
  status.device = kEvil;
  status.device_description = kEvil;
  status.incarnation = kEvil;
  status.version = kEvil;
  status.errors[0].method = kEvil;
  status.errors[0].message = kEvil;
  status.errors[0].trace_id = kEvil;
  const std::string page = StatusPage(status).body;
  EXPECT_THAT(page, Not(HasSubstr("<script>")));
  EXPECT_THAT(page, Not(HasSubstr("alert(\"")));
  EXPECT_THAT(page, HasSubstr(kHarmless));
}

TEST(StatusPage, LetsNothingInButItself) {
  const HttpPage first = StatusPage(Example());
  ASSERT_FALSE(first.headers.empty());
  EXPECT_EQ(first.headers[0].first, "Content-Security-Policy");
  const std::string& policy = first.headers[0].second;
  EXPECT_THAT(policy, HasSubstr("default-src 'none'"));
  EXPECT_THAT(policy, Not(HasSubstr("unsafe")));
  const size_t begin = policy.find("nonce-") + 6;
  const std::string nonce = policy.substr(begin, policy.find('\'', begin) - begin);
  EXPECT_THAT(first.body, HasSubstr("<style nonce=\"" + nonce + "\">"));
  EXPECT_THAT(first.body, HasSubstr("<script nonce=\"" + nonce + "\">"));
  EXPECT_NE(StatusPage(Example()).headers[0].second, policy) << "one that can be guessed lets others in";
  for (const char* asset : {"http://", "https://", "src=", "<link", "@import", "url("}) {
    EXPECT_THAT(first.body, Not(HasSubstr(asset)));
  }
}

TEST(StatusPage, EachPurposeOfMemoryHasAColorThatNothingElseHas) {
  ServerStatus status = Example();
  status.heads.clear();
  status.memory.clear();
  for (const absl::string_view purpose : engine::kMemoryPurposes) {
    status.memory.push_back({std::string(purpose), 1 << 20});
  }
  const std::string page = StatusPage(status).body;
  for (size_t color = 0; color <= engine::kMemoryPurposes.size(); ++color) {
    const std::string name = "p" + std::to_string(color);
    EXPECT_THAT(page, HasSubstr("." + name + " { fill:"));
    EXPECT_THAT(page, HasSubstr("<rect class=\"" + name + "\"")) << "the last one is what is used in all";
  }
}

TEST(StatusPage, OnANarrowScreenEachCellSaysWhatItIs) {
  const std::string page = StatusPage(Example()).body;
  EXPECT_THAT(page, HasSubstr("data-name=\"loss\""));
  EXPECT_THAT(page, HasSubstr("data-name=\"‖dW‖\""));
  EXPECT_THAT(page, HasSubstr("content: attr(data-name)"));
}

TEST(StatusPage, ALossThatIsNotANumberIsShownFromTheFirstChunkOn) {
  ServerStatus status = Example();
  status.heads[0].loss_tokens = 0;  // none of them had a finite one
  status.heads[0].loss = std::nan("");
  EXPECT_THAT(StatusPage(status).body, HasSubstr(">NaN<"));
  status.heads[0].loss = 0;
  EXPECT_THAT(StatusPage(status).body, Not(HasSubstr(">NaN<")));
}

TEST(StatusPage, ShowsNoIdWithWhichSomebodyCouldSpeakForASession) {
  const std::string id = engine::RandomId();
  RecentErrors errors;
  errors.Add({.time = absl::Now(),
              .method = "GradientService/BeginFlush",
              .code = 9,
              .message = "session " + id + " lane 0 contributed",
              .trace_id = "0af7651916cd43dd8448eb211c80319c"});
  ServerStatus status = Example();
  status.incarnation = id;
  status.errors = errors.Read();
  for (const std::string& text : {StatusPage(status).body, StatusJson(status)}) {
    EXPECT_THAT(text, Not(HasSubstr(id)));
    EXPECT_THAT(text, Not(HasSubstr(id.substr(9))));
    EXPECT_THAT(text, HasSubstr("session " + id.substr(0, 6) + "… lane 0 contributed"));
    EXPECT_THAT(text, HasSubstr("0af7651916cd43dd8448eb211c80319c"));
  }
}

TEST(WithoutIds, CutsUuidsAndLongHexadecimalNumbersAndNothingElse) {
  EXPECT_EQ(WithoutIds("a 01234567-89ab-4cde-8f01-23456789abcd/0=3, 01234567-89ab-4cde-8f01-23456789abcd"),
            "a 012345…/0=3, 012345…");
  EXPECT_EQ(WithoutIds("0123456789abcdef"), "012345…");
  EXPECT_EQ(WithoutIds("0123456789ABCDE"), "0123456789ABCDE") << "too short";
  for (const char* other :
       {"", "generation 18446744073709551615, not 3", "de-facto - 12", "head 'x' – 2048-8192"}) {
    EXPECT_EQ(WithoutIds(other), other);
  }
}

TEST(StatusPage, ManySessionsAreCutShort) {
  ServerStatus status = Example();
  status.heads[0].sessions.resize(1000);
  const std::string page = StatusPage(status).body;
  EXPECT_THAT(page, HasSubstr("and 950 more"));
  EXPECT_LT(page.size(), size_t{64} << 10);
}

TEST(StatusJson, SaysTheSame) {
  const auto json = nlohmann::json::parse(StatusJson(Example()));
  EXPECT_EQ(json["version"], "1.2.3");
  EXPECT_EQ(json["uptime_seconds"], 3 * 3600);
  EXPECT_EQ(json["per_second"]["tokens"], 45'678);
  EXPECT_EQ(json["heads"][0]["name"], "english");
  EXPECT_EQ(json["heads"][0]["window_state"], "frozen");
  EXPECT_EQ(json["heads"][0]["flush_age_seconds"], 7);
  EXPECT_EQ(json["heads"][0]["sessions"][0]["idle_seconds"], 2);
  EXPECT_EQ(json["heads"][0]["loss"], 2.75);
  EXPECT_EQ(json["heads"][0]["sessions"][0]["streams"], 7);
  EXPECT_EQ(json["memory"]["reserved"][0]["place"], "device");
  EXPECT_EQ(json["rpcs_in_flight"]["LossService/Compute"], 7);
  EXPECT_EQ(json["recent_errors"][0]["code"], "NOT_FOUND");
}

TEST(StatusJson, WhatIsNotThereOrNotFiniteIsNull) {
  ServerStatus status = Example();
  status.heads[0].loss = std::nan("");
  status.heads[0].gradient_norm = INFINITY;
  status.heads[0].snapshot.window_since.reset();
  status.errors[0].message = "bytes \xff that are no text";
  const auto json = nlohmann::json::parse(StatusJson(status));
  EXPECT_TRUE(json["heads"][0]["loss"].is_null());
  EXPECT_TRUE(json["heads"][0]["gradient_norm"].is_null());
  EXPECT_TRUE(json["heads"][0]["window_age_seconds"].is_null());
  status.heads[0].loss_tokens = 0;
  status.heads[0].loss = 0;
  EXPECT_TRUE(nlohmann::json::parse(StatusJson(status))["heads"][0]["loss"].is_null());
}

}  // namespace
}  // namespace lossd::telemetry::status_page_test
