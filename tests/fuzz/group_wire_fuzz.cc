// Messages between the ranks of a group: commands, answers and reports.
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
}

// There is one way to write each value.
void ExpectSame(const std::string& written, absl::string_view read) {
  Expect(written == read, "what is read is written the same way");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using lossd::fuzz::ExpectSame;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto command = lossd::rpc::ParseCommand(bytes); command.ok()) {
    lossd::fuzz::Check(*command);
    ExpectSame(lossd::rpc::SerializeCommand(*command), bytes);
  }
  if (const auto answer = lossd::rpc::ParseAnswer(bytes); answer.ok()) {
    ExpectSame(lossd::rpc::SerializeAnswer(*answer), bytes);
  }
  if (const auto report = lossd::rpc::ParseReport(bytes); report.ok()) {
    ExpectSame(lossd::rpc::SerializeReport(*report), bytes);
  }
  return 0;
}
