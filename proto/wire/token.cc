#include "proto/wire/token.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace lossd::wire {

bool IsLoopbackHost(const std::string& host) {
  if (host == "localhost" || host == "[::1]") return true;
  in_addr parsed{};  // a name may begin with 127, too
  return inet_pton(AF_INET, host.c_str(), &parsed) == 1 &&
         ntohl(parsed.s_addr) >> IN_CLASSA_NSHIFT == IN_LOOPBACKNET;
}

}  // namespace lossd::wire
