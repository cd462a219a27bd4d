// Who may call what: the one table.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_ROLES_H_
#define LOSSD_SERVER_RPC_TRANSPORT_ROLES_H_

#include <optional>
#include <string_view>

namespace lossd::rpc {

// Each may do what those before it may.
enum class Role {
  kAnybody,   // without a token
  kReadOnly,  // sees names, states and sizes; changes nothing, and sees neither weights nor gradients
  kTrainer,   // what a training needs
  kAdmin,     // what takes something away from others, or opens the server's files to them
};

const char* RoleName(Role role);                         // "anybody", "read-only", "trainer", "admin"
std::optional<Role> ParseRole(std::string_view name);    // none for "anybody": no token has that role
std::optional<Role> LeastRole(std::string_view method);  // of MethodOfPath's names; none: not in the table

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_ROLES_H_
