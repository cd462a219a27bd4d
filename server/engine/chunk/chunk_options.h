// The loss options of a chunk: whether they can be computed, what they are together with the head's, and what
// is returned for them.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_CHUNK_OPTIONS_H_
#define LOSSD_SERVER_ENGINE_CHUNK_CHUNK_OPTIONS_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"

namespace lossd::engine {

inline constexpr char kTeacherField[] = "options.distillation.teacher";

// INVALID_ARGUMENT naming `field`: what holds of a head's numbers holds of those that a chunk puts in their
// place.
absl::Status ValidateLogitScale(float logit_scale, absl::string_view field);
absl::Status ValidateSoftcap(float softcap, absl::string_view field);

// Checks a chunk whose number of tokens is sane: numbers, what is wanted, and the arrays by token, which must
// be finite even where the label is ignored. INVALID_ARGUMENT naming the field, what it is and what it must
// be.
absl::Status ValidateOptions(const Chunk& chunk, const HeadConfig& head);
// INVALID_ARGUMENT if `teacher` cannot be the teacher of `head`.
absl::Status ValidateTeacher(const HeadConfig& teacher, const HeadConfig& head);

// INVALID_ARGUMENT for a workspace of `workspace_bytes`, where one row with soft targets takes `row_bytes`.
absl::Status NoRoomForTeacher(const HeadConfig& head, int64_t row_bytes, int64_t workspace_bytes);

// What has to be computed of each token: what is wanted, and z-losses and divergences wherever there are any,
// for their sum.
WantedReturns ReturnsOf(const Chunk& chunk);
// Bytes of them for one token. Counts no more than can be asked for.
int64_t ReturnBytes(const WantedReturns& returns);

// Whether returns are wanted of tokens whose factors are all 0: as kernels::RowReturns::unweighted.
bool WantsUnweighted(const WantedReturns& wanted);

// Makes the memory for `wanted` in `returns`.
kernels::RowReturns Allocate(const WantedReturns& wanted, int64_t tokens, TokenReturns* returns);

// Whether these are the losses and returns of so many tokens, of which `wanted` was wanted.
bool IsAnswer(int64_t tokens, const WantedReturns& wanted, const std::string& losses,
              const TokenReturns& returns);
// Copies returns to where there is memory for exactly them.
void PutInto(const kernels::RowReturns& rows, const TokenReturns& returns);

// Fills in the sums of `answer`, whose losses and returns are there. `class_weights`: null if none count.
void SumTokens(const Chunk& chunk, const float* class_weights, ChunkAnswer* answer);

// The sum of those losses of `answer` that are finite and of valid tokens.
double SumOfFiniteLosses(const Chunk& chunk, const ChunkAnswer& answer);

// FAILED_PRECONDITION if the chunk demands other weights than those of this version.
absl::Status CheckWeightVersion(const Chunk& chunk, uint64_t weight_version);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_CHUNK_OPTIONS_H_
