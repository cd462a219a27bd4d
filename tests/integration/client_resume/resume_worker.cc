// A trainer's process that may be killed at any moment: resume_worker TARGET CLIENT_KEY LANES
// With one lane it asks the server how far its predecessor came and sends the rest; with several it sends
// everything from the beginning again, and leaves it to the server's marks what of it counts. Exit status 0
// when everything is in.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_resume/numbered_chunks.h"

namespace {

int Fail(const char* step, const absl::Status& status) {
  std::fprintf(stderr, "resume_worker: %s: %s\n", step, status.ToString().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  using lossd::testing::NumberedBatch;
  if (argc != 4) return 2;
  auto client = lossd::Client::Connect(argv[1], {});
  if (!client.ok()) return Fail("Connect", client.status());
  auto head = (*client)->GetHead(lossd::testing::NumberedHead().name);
  if (!head.ok()) return Fail("GetHead", head.status());
  const int lanes = std::atoi(argv[3]);
  auto session =
      head->OpenSession({.client_key = argv[2], .chunk_bytes = lossd::testing::kChunkBytes, .lanes = lanes});
  if (!session.ok()) return Fail("OpenSession", session.status());

  int64_t first = 0;
  if (lanes == 1) {
    first = static_cast<int64_t>(session->marks().lanes.at(0).accepted);
  } else if (auto status = session->ResumeAt(std::vector<uint64_t>(static_cast<size_t>(lanes), 1));
             !status.ok()) {
    return Fail("ResumeAt", status);
  }
  NumberedBatch rest(first);
  if (auto result = session->Compute(rest.batch(), rest.outputs()); !result.ok()) {
    return Fail("Compute", result.status());
  }
  return 0;
}
