// Preloaded into a program, this says on standard error when OpenSSL cleans up at the end of the process.
#include <openssl/crypto.h>
#include <unistd.h>

#include <string_view>

namespace {

void Say() {
  constexpr std::string_view kLine = "OpenSSL has cleaned up\n";
  (void)!write(STDERR_FILENO, kLine.data(), kLine.size());
}

[[gnu::constructor]] void Watch() { (void)OPENSSL_atexit(Say); }

}  // namespace
