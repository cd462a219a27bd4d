// One rank with an fp32 shard of a head's weights, as a process of its own: writes it, commits once every row
// is there, reads it back, and prints what memory that took beyond the shard.
//
// usage: weight_rank_worker TARGET HEAD KEY FIRST_ROW ROWS SEED [die]
//
// With "die" it ends in the middle of its write, as if it were killed. Exit status 0 if all was well.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_server/weight_ranks.h"
#include "tests/support/wait.h"

namespace lossd::testing {
namespace {

int Fail(const absl::Status& status) {
  std::cerr << "weight_rank_worker: " << status << "\n";
  return 1;
}

// In bytes.
int64_t StatusField(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    int64_t kilobytes = 0;
    if (word == name + ":" && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

int Run(const std::vector<std::string>& arguments) {
  const int64_t first_row = std::atoll(arguments[3].c_str());
  const int64_t rows = std::atoll(arguments[4].c_str());
  const int64_t seed = std::atoll(arguments[5].c_str());
  const bool dies = arguments.size() > 6;
  auto client = Client::Connect(arguments[0], {});
  if (!client.ok()) return Fail(client.status());
  auto head = (*client)->GetHead(arguments[1]);
  if (!head.ok()) return Fail(head.status());
  const int64_t hidden = head->config().hidden_size;
  const int64_t vocab = head->config().vocab_size;
  std::vector<float> shard = WeightRows(first_row, rows, hidden, seed);
  const int64_t before = StatusField("VmRSS");

  const auto write = head->BeginWrite({.write_key = arguments[2]});
  if (!write.ok()) return Fail(write.status());
  const Progress die_half_way = [dies](int64_t done, int64_t total) {
    if (dies && done > total / 2) _exit(9);
  };
  absl::Status status = write->WriteRows(first_row, rows, DataType::kFloat32, shard.data(), {}, die_half_way);
  if (!status.ok()) return Fail(status);
  // The ranks' barrier.
  absl::StatusOr<HeadInfo> info = absl::UnknownError("");
  const auto all_rows = [&] {
    info = head->Info();
    return !info.ok() || info->staged_rows == vocab || info->weight_version > 0;
  };
  Await("the other ranks", all_rows, std::chrono::milliseconds(5));
  if (!info.ok()) return Fail(info.status());
  const auto version = write->Commit();
  if (!version.ok()) return Fail(version.status());

  shard.assign(shard.size(), 2.0F);
  const auto read =
      head->ReadRows(first_row, rows, DataType::kFloat32, shard.data(), {.weight_version = *version});
  if (!read.ok()) return Fail(read.status());
  const int64_t grown = StatusField("VmHWM") - before;
  for (int64_t i = 0; i < rows * hidden; ++i) {
    if (shard[static_cast<size_t>(i)] != WeightAt(first_row + i / hidden, i % hidden, seed)) {
      return Fail(absl::DataLossError("what was read is not what was written"));
    }
  }
  std::cout << *version << " " << grown << std::endl;
  return 0;
}

}  // namespace
}  // namespace lossd::testing

int main(int argc, char** argv) {
  if (argc < 7) return 2;
  return lossd::testing::Run({argv + 1, argv + argc});
}
