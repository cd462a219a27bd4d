// What client and server hold of tokens: how long one is at most, and where it may travel in plain text.
#ifndef LOSSD_PROTO_WIRE_TOKEN_H_
#define LOSSD_PROTO_WIRE_TOKEN_H_

#include <cstddef>
#include <string>

namespace lossd::wire {

inline constexpr size_t kLongestToken = 512;

// Whether a host is this machine: localhost, an address of 127.0.0.0/8, or in brackets ::1 or such an address
// as IPv6 has it.
bool IsLoopbackHost(const std::string& host);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_TOKEN_H_
