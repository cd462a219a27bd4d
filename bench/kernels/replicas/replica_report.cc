#include "bench/kernels/replicas/replica_report.h"

#include <algorithm>
#include <cstdio>

#include "bench/kernels/command_line.h"
#include "bench/kernels/measure.h"
#include "kernels/slices.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;

// The time of the slowest replica in each round.
std::vector<double> SlowestRounds(const std::vector<Json>& replicas, const std::string& time) {
  std::vector<double> slowest;
  for (const Json& replica : replicas) {
    const auto rounds = replica[time].get<std::vector<double>>();
    slowest.resize(rounds.size());
    for (size_t i = 0; i < rounds.size(); ++i) slowest[i] = std::max(slowest[i], rounds[i]);
  }
  return slowest;
}

std::vector<double> Plus(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> sum = b;
  for (size_t i = 0; i < a.size(); ++i) sum[i] += a[i];
  return sum;
}

Json SentJson(const ReplicaCase& of) {
  Json all = Json::array();
  for (int replica = 0; replica < of.replicas(); ++replica) {
    const SentBytes sent = SentBy(of, replica);
    all.push_back({{"sum", sent.sum}, {"step", sent.step}});
  }
  return all;
}

double Gigabytes(const Json& bytes) { return bytes.get<double>() * 1e-9; }

void PrintTime(const std::string& what, const Json& milliseconds, double gigabytes) {
  std::printf("  %-24s %9.3f", what.c_str(), milliseconds.get<double>());
  if (gigabytes > 0) std::printf(" %9.3f", gigabytes);
  std::printf("\n");
}

}  // namespace

Json ToJson(const ReplicaTimes& times) {
  Json json = {
      {"hardware", times.hardware}, {"checked", times.checked}, {"reserved_bytes", times.reserved_bytes}};
  for (const ReplicaTimes::Round& round : times.rounds) {
    json["whole"].push_back(round.whole);
    for (size_t i = 0; i < kPhases; ++i) json[kReplicaPhases[i]].push_back(round.phases[i]);
    for (size_t i = 0; i < kOperations; ++i) json[kBareOperations[i]].push_back(round.operations[i]);
  }
  return json;
}

SentBytes SentBy(const ReplicaCase& of, int replica) {
  const kernels::SliceLayout layout(of.step.vocab, of.replicas());
  const int64_t own = layout.Slice(replica).count * of.step.hidden;
  return {.sum = 4 * (of.step.elements() - own), .step = (of.replicas() - 1) * own * SizeOf(of.step.dtype)};
}

Json Collect(const ReplicaCase& of, const std::vector<std::string>& of_replicas) {
  std::vector<Json> replicas;
  for (const std::string& one : of_replicas) replicas.push_back(Json::parse(one));
  const std::vector<double> whole = SlowestRounds(replicas, "whole");
  Json phases;
  for (const char* phase : kReplicaPhases) phases[phase] = Median(SlowestRounds(replicas, phase));
  Json bare;
  std::vector<double> sums;
  for (const char* operation : kBareOperations) {
    const std::vector<double> times = SlowestRounds(replicas, operation);
    bare[operation] = Median(times);
    sums = Plus(sums, times);
  }
  bare["milliseconds"] = Median(sums);
  std::vector<double> ratios;
  for (size_t i = 0; i < whole.size(); ++i) ratios.push_back(whole[i] / sums[i]);
  const int64_t others = of.step.elements() / of.replicas() * (of.replicas() - 1);
  bare["sent_bytes"] = {{"reduce_scatter", 4 * others}, {"all_gather", SizeOf(of.step.dtype) * others}};
  return {{"devices", of.devices},
          {"vocab", of.step.vocab},
          {"hidden", of.step.hidden},
          {"dtype", ShortName(of.step.dtype)},
          {"optimizer", of.optimizer},
          {"master", of.step.has_master()},
          {"milliseconds", Median(whole)},
          {"phases", phases},
          {"sent_bytes", SentJson(of)},
          {"bare", bare},
          {"ratio", Median(ratios)},
          {"reserved_bytes", replicas[0]["reserved_bytes"]},
          {"checked_elements", replicas[0]["checked"]},
          {"hardware", replicas[0]["hardware"]},
          {"all_milliseconds", whole}};
}

void PrintReplicaTable(const Json& r) {
  std::printf("%s over [%lld, %lld] %s%s, %zu replicas; %s\n", r["optimizer"].get<std::string>().c_str(),
              static_cast<long long>(r["vocab"].get<int64_t>()),
              static_cast<long long>(r["hidden"].get<int64_t>()), r["dtype"].get<std::string>().c_str(),
              r["master"].get<bool>() ? " with an fp32 master" : "", r["devices"].size(),
              r["hardware"].get<std::string>().c_str());
  std::printf("  %-24s %9s %9s\n", "", "ms", "GB sent");
  const Json& sent = r["sent_bytes"][0];
  PrintTime("step of the replicas", r["milliseconds"], Gigabytes(sent["sum"]) + Gigabytes(sent["step"]));
  for (const char* phase : kReplicaPhases) {
    PrintTime(std::string("  ") + phase, r["phases"][phase],
              sent.contains(phase) ? Gigabytes(sent[phase]) : 0);
  }
  const Json& bare = r["bare"];
  const Json& bare_sent = bare["sent_bytes"];
  PrintTime("bare", bare["milliseconds"],
            Gigabytes(bare_sent["reduce_scatter"]) + Gigabytes(bare_sent["all_gather"]));
  for (const char* operation : kBareOperations) {
    PrintTime(std::string("  ") + operation, bare[operation],
              bare_sent.contains(operation) ? Gigabytes(bare_sent[operation]) : 0);
  }
  std::printf(
      "\nratio to the bare operations: %.3f\nreserved: %.3f GB of a replica\nchecked: bits of %lld "
      "elements\n",
      r["ratio"].get<double>(), Gigabytes(r["reserved_bytes"]),
      static_cast<long long>(r["checked_elements"].get<int64_t>()));
}

}  // namespace lossd::bench
