// How many processors the process computes on, and which.
#ifndef LOSSD_SERVER_STARTUP_PROCESSORS_H_
#define LOSSD_SERVER_STARTUP_PROCESSORS_H_

namespace lossd {

// Sets variables of OpenMP that are not set; true if it has. OpenMP reads them while it is loaded, so that
// the program must be started anew then. Without them OpenMP's threads would spin between products, in the
// way of clients, and more of them than the quota of the control group has processors would stop together.
// All threads that are started later have the affinity mask that the process was started with. Before other
// threads start.
bool SetUpOpenMp();

// Warns of more threads than processors that the process may use. Of fewer threads than the machine has
// processors, says why.
void LogOddThreads();

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_PROCESSORS_H_
