// A chunk's timing as the server tells it, on the client's clock.
#ifndef LOSSD_CLIENT_SRC_SESSION_CHUNK_TIMES_H_
#define LOSSD_CLIENT_SRC_SESSION_CHUNK_TIMES_H_

#include <chrono>
#include <cstdint>

#include "client/src/session/clock_offset.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

int64_t Microseconds(std::chrono::system_clock::time_point time);

// Learns from one chunk's way there and back.
void NoteTiming(const v1::ChunkTiming& timing, std::chrono::system_clock::time_point sent,
                std::chrono::system_clock::time_point arrived, ClockOffset* offset);

// All but `first_token` and `tokens`.
ChunkTiming ToChunkTiming(const v1::ChunkTiming& timing, std::chrono::system_clock::time_point sent,
                          std::chrono::system_clock::time_point arrived, const ClockOffset& offset);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_CHUNK_TIMES_H_
