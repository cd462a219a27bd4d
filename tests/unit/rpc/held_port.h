// A port for servers of a test, one after the other.
#ifndef LOSSD_TESTS_UNIT_RPC_HELD_PORT_H_
#define LOSSD_TESTS_UNIT_RPC_HELD_PORT_H_

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/transport/listener.h"

namespace lossd::testing {

// Nobody else is given it while this lives, also where no server has it: late at the start, or between two.
class HeldPort {
 public:
  HeldPort() : held_(Hold()) {}

  int number() const { return held_->port(); }
  std::string address() const { return absl::StrCat("127.0.0.1:", number()); }

 private:
  static std::unique_ptr<rpc::Listener> Hold() {
    absl::StatusOr<std::unique_ptr<rpc::Listener>> held = rpc::Listener::Hold("127.0.0.1:0");
    if (held.ok()) return *std::move(held);
    std::cerr << "no port can be held: " << held.status() << "\n";
    std::abort();
  }

  std::unique_ptr<rpc::Listener> held_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_UNIT_RPC_HELD_PORT_H_
