// What fuzzers have in common. Each defines LLVMFuzzerTestOneInput, which keeps nothing from one call to the
// next.
#ifndef LOSSD_TESTS_FUZZ_FUZZ_H_
#define LOSSD_TESTS_FUZZ_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace lossd::fuzz {

// Ends the program, which makes libFuzzer keep the input, unless it `holds`.
inline void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not true: %s\n", what);
  std::abort();
}

inline std::string_view TextOf(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

}  // namespace lossd::fuzz

// libFuzzer's entry.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // LOSSD_TESTS_FUZZ_FUZZ_H_
