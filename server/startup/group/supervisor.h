// The parent of a group's ranks on one node: starts a process for each device, and all of them again when one
// dies. To whoever started it, it is the daemon: it has its pid, its signals and its exit status.
#ifndef LOSSD_SERVER_STARTUP_GROUP_SUPERVISOR_H_
#define LOSSD_SERVER_STARTUP_GROUP_SUPERVISOR_H_

#include <string>
#include <vector>

#include "server/startup/group/group_options.h"

namespace lossd {

struct SupervisorOptions {
  std::vector<std::string> arguments;  // the command line, the program's name first
  GroupOptions group;
  // As the flags have them. Ranks get these with the ports that were free, which are held for all epochs.
  std::string listen;
  std::string metrics_listen;
  std::string health_listen;
};

// Runs the node's ranks until the group has ended; returns the exit status. To be called while the process
// has one thread, and the log is set up.
//
// Ranks of a parent that was killed just before may hold the folder of checkpoints and the ports: until they
// are gone, or for `start_timeout`, it waits with the first epoch.
//
// The first SIGTERM or SIGINT drains the group, all nodes of it; at another one a second or more later the
// node's ranks are killed, and the process dies of that signal. SIGHUP goes on to all of its ranks. A group
// whose leader has ended with status 0, 1 or 2 has ended, and this is the exit status; for another node it
// has when its first rank has ended with 0, and its status is 0 if the group has served or this node was told
// to end, else 1. If a rank of the node is lost in any other way, or has noticed
// that one of another node was, all of the node's are killed, and only then a new epoch begins, as it does at
// the other nodes; but not if it never served (the status is then that of the rank that failed first), if it
// was draining (1), or if five in a row served for less than `short_life` each (1). A rank that stands still
// (SIGSTOP) for twice `rank_timeout` is killed: by then the others have given it up.
int Supervise(const SupervisorOptions& options);

// `listen` with `port` in the place of port 0 of its first host:port.
std::string WithPort(const std::string& listen, int port);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_SUPERVISOR_H_
