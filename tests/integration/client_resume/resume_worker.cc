// A trainer's process that may be killed at any moment: resume_worker TARGET CLIENT_KEY
// Asks the server how far its predecessor came, sends the rest, and closes the session. Exit status 0 when
// everything is in.
#include <cstdio>

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
  if (argc != 3) return 2;
  auto client = lossd::Client::Connect(argv[1], {});
  if (!client.ok()) return Fail("Connect", client.status());
  auto head = (*client)->GetHead(lossd::testing::NumberedHead().name);
  if (!head.ok()) return Fail("GetHead", head.status());
  auto session = head->OpenSession({.client_key = argv[2], .chunk_bytes = lossd::testing::kChunkBytes});
  if (!session.ok()) return Fail("OpenSession", session.status());

  NumberedBatch rest(static_cast<int64_t>(session->marks().lanes.at(0).accepted));
  if (auto result = session->Compute(rest.batch(), rest.outputs()); !result.ok()) {
    return Fail("Compute", result.status());
  }
  return 0;
}
