// Commands of a group's leader, as another rank reads them.
#include <google/protobuf/stubs/logging.h>

#include <string>
#include <variant>

#include "server/rpc/group/group_wire.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

void CheckArrays(const engine::StartBatchCommand& batch) {
  Expect(batch.kind.holder >= 0, "a rank holds the batch");
  for (const engine::ChunkHeader& chunk : batch.chunks) {
    const auto tokens = static_cast<size_t>(chunk.tokens);
    Expect(chunk.tokens > 0 && tokens <= chunk.labels.size(), "there are no more tokens than came");
    Expect(chunk.labels.size() == 8 * tokens, "every token has a label");
    for (const std::string* floats : {&chunk.token_weights, &chunk.lse_gradients, &chunk.entropy_gradients}) {
      Expect(floats->empty() || floats->size() == 4 * tokens, "every token has a number, or none has");
    }
  }
}

void CheckRows(int64_t first_row, int64_t rows) { Expect(first_row >= 0 && rows >= 0, "rows are counted"); }

void Check(const engine::GroupCommand& command) {
  if (const auto* batch = std::get_if<engine::StartBatchCommand>(&command)) CheckArrays(*batch);
  if (const auto* read = std::get_if<engine::ReadRowsCommand>(&command)) {
    CheckRows(read->first_row, read->rows);
  }
  if (const auto* written = std::get_if<engine::WriteRowsCommand>(&command)) {
    CheckRows(written->first_row, written->rows);
  }
  const std::string bytes = rpc::SerializeCommand(command);
  const absl::StatusOr<engine::GroupCommand> again = rpc::ParseCommand(bytes);
  Expect(again.ok(), "what is written is accepted");
  Expect(again->index() == command.index() && rpc::SerializeCommand(*again) == bytes,
         "what is read again is the same");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer kSilent;  // it reports every string that is no UTF-8
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<lossd::engine::GroupCommand> command = lossd::rpc::ParseCommand(bytes);
  if (command.ok()) lossd::fuzz::Check(*command);
  return 0;
}
