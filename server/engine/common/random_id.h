#ifndef LOSSD_SERVER_ENGINE_COMMON_RANDOM_ID_H_
#define LOSSD_SERVER_ENGINE_COMMON_RANDOM_ID_H_

#include <string>

namespace lossd::engine {

// A random (version 4) UUID from the system's generator: not to be guessed, never the same twice.
std::string RandomId();

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_RANDOM_ID_H_
