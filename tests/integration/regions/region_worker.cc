// A client to be killed: region_worker TARGET sends chunks out of a region until it dies.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "lossd/client.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  auto client = lossd::Client::Connect(argv[1], {});
  if (!client.ok()) return 1;
  auto head = (*client)->GetHead("h");
  if (!head.ok()) return 1;
  constexpr int64_t kTokens = 512;
  const int64_t bytes = kTokens * head->config().hidden_size * static_cast<int64_t>(sizeof(float));
  auto region = (*client)->CreateRegion(lossd::RegionKind::kSystem, 2 * bytes);
  auto session = head->OpenSession({.chunk_bytes = bytes / 16});
  if (!region.ok() || !session.ok()) return 1;
  const std::vector<int64_t> labels(kTokens, 1);
  std::vector<float> losses(kTokens);
  for (;;) {
    const auto result =
        session->Compute({.labels = labels, .hidden_states = region->data()},
                         {.losses = losses, .dx = static_cast<std::byte*>(region->data()) + bytes});
    if (!result.ok()) {
      std::fprintf(stderr, "region_worker: %s\n", result.status().ToString().c_str());
      return 1;
    }
  }
}
