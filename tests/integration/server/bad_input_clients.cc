#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/server/bad_input.h"
#include "tests/support/program.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/wait.h"

namespace lossd::testing {
namespace {

// Ignored rows leave dW alone but are answered with a full dX.
v1::Chunk AllIgnored(uint64_t sequence) {
  v1::Chunk chunk = MakeChunk(sequence, 1, 128, kInputVocab, kInputHidden, 3);
  for (int64_t row = 0; row < 128; ++row) SetLabel(chunk, row, -100);
  return chunk;
}

Outcome VanishMidStream(Environment& environment) {
  const engine::Gauge& live = environment.server().engine().counters().live_streams;
  const int64_t before = live;
  {
    Stubs own(environment.server().Channel());
    const v1::OpenSessionResponse session = OpenSession(own, "h", "vanishing");
    ComputeStream stream(own, session);
    for (uint64_t sequence = 1; sequence <= 20; ++sequence) stream.Send(AllIgnored(sequence));
  }  // cancelled without a word, and its connection closed
  Await("the stream to end", [&] { return live == before; });
  return {0, ""};
}

Outcome NeverRead(Environment& environment) {
  const engine::Counters& counters = environment.server().engine().counters();
  const uint64_t before = counters.payload_bytes_in;
  Stubs own(environment.server().Channel());
  const v1::OpenSessionResponse session = OpenSession(own, "h", "mute");
  ComputeStream stream(own, session);
  constexpr uint64_t kChunks = 4096;  // 20 MiB and as much again in answers
  std::thread writer([&] {
    for (uint64_t sequence = 1; sequence <= kChunks && stream.Send(AllIgnored(sequence)); ++sequence) {
    }
  });
  // The server stops taking chunks once the answers it could not deliver have used up the credit.
  uint64_t taken = 0;
  for (uint64_t last = 1; taken != last;) {
    last = taken;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    taken = counters.payload_bytes_in - before;
  }
  stream.Cancel();
  writer.join();
  stream.Finish();
  const uint64_t sent = kChunks * (4096 + 1024);
  if (taken >= sent) return {0, "everything was taken: " + std::to_string(taken)};
  return {0, "bounded"};
}

// Chunks without a payload cost no credit, yet their refusals pile up just the same.
Outcome NeverReadRefusals(Environment& environment) {
  const engine::Counter& refused = environment.server().engine().counters().chunks_rejected;
  const uint64_t before = refused;
  Stubs own(environment.server().Channel());
  const v1::OpenSessionResponse session = OpenSession(own, "h", "mute and empty");
  ComputeStream stream(own, session);
  constexpr uint64_t kChunks = 50'000;
  std::thread writer([&] {
    v1::Chunk empty;
    empty.set_generation(1);
    for (uint64_t sequence = 1; sequence <= kChunks; ++sequence) {
      empty.set_sequence(sequence);
      if (!stream.Send(empty)) return;
    }
  });
  uint64_t taken = 0;
  for (uint64_t last = 1; taken != last;) {
    last = taken;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    taken = refused - before;
  }
  stream.Cancel();
  writer.join();
  stream.Finish();
  if (taken >= kChunks) return {0, "everything was taken: " + std::to_string(taken)};
  return {0, "bounded"};
}

Outcome Garbage(Environment& environment) {
  const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(environment.server().port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return {0, "no connection"};
  }
  std::string bytes;
  for (const float value : RandomFloats(4096, 11)) bytes.append(reinterpret_cast<const char*>(&value), 4);
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t now = send(descriptor, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (now <= 0) break;
    sent += static_cast<size_t>(now);
  }
  std::array<char, 512> buffer{};
  while (recv(descriptor, buffer.data(), buffer.size(), 0) > 0) {
  }
  close(descriptor);
  return {0, "closed"};
}

// lossctl with a limit on file size, which is what a full disk looks like to it.
Outcome FlushToAFullDisk(Environment& environment) {
  const ScratchFolder folder;
  const std::string out = folder.File("full_disk.safetensors");
  const Ended ended =
      RunProgram({"/bin/sh", "-c", R"(trap '' XFSZ; ulimit -f 2; exec "$0" "$@")", LOSSCTL_BINARY, "--server",
                  environment.server().target(), "flush", "h", "--out", out});
  Outcome outcome{ended.status, ended.output};
  if (std::filesystem::exists(out)) outcome.message += " and left a file";
  return outcome;
}

}  // namespace

std::vector<Case> ClientCases() {
  return {
      {"client_vanishes_mid_stream", VanishMidStream, 0, {}, std::nullopt},
      {"client_never_reads", NeverRead, 0, {"bounded"}, std::nullopt},
      {"client_never_reads_refusals", NeverReadRefusals, 0, {"bounded"}, std::nullopt},
      {"garbage_on_the_port", Garbage, 0, {"closed"}, std::nullopt},
      {"full_disk_under_out", FlushToAFullDisk, 6, {"full_disk.safetensors"}, std::nullopt},
      {"repeated_sequence",
       [](Environment& environment) {
         const std::optional<v1::ChunkResult> result =
             environment.Compute(MakeChunk(1, 1, 16, kInputVocab, kInputHidden, 5));
         if (!result.has_value() || result->disposition() != v1::DISPOSITION_REPEATED) {
           return Outcome{0, "not repeated"};
         }
         return Outcome{0, result->dx().size() == 16 * kInputHidden * 4 ? "computed again" : "no dx"};
       },
       0,
       {"computed again"},
       std::nullopt},
  };
}

}  // namespace lossd::testing
