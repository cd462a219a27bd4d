// Headers of W3C's Trace Context, as anybody may send them.
#include <algorithm>
#include <string>

#include "proto/wire/trace_context.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

bool IsLowerHex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

void CheckParent(std::string_view parent) {
  const std::string_view id = wire::TraceIdOf(parent);
  if (id.empty()) return;
  Expect(id.data() == parent.data() + 3 && id.size() == 32, "the id is where the format has it");
  Expect(IsLowerHex(id) && id != std::string(32, '0'), "the id is one");
  // It goes into logs and metadata: nothing in it may end a line.
  Expect(std::all_of(parent.begin(), parent.end(), [](char c) { return c >= ' ' && c <= '~'; }),
         "what is accepted is printable");
  const std::string rewritten = "00-" + std::string(id) + std::string(parent.substr(35, 20));
  Expect(wire::TraceIdOf(rewritten) == id, "what version 00 has of it is a parent, too");
  Expect(wire::TraceIdOf(parent.substr(0, 54)).empty(), "a part of it is none");
}

void CheckState(std::string_view state) {
  if (!wire::IsTraceState(state)) return;
  Expect(!state.empty() && state.size() <= wire::kMaxTraceState, "it has the size that it may have");
  Expect(wire::IsTraceState(state.substr(state.size() / 2)), "a part of it is printable, too");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = lossd::fuzz::TextOf(data, size);
  lossd::fuzz::CheckParent(text);
  lossd::fuzz::CheckState(text);
  return 0;
}
