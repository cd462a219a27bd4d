// Marks as calls name them that end a window: two that say the same are to be told from two that differ.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_SESSION_MARKS_H_
#define LOSSD_SERVER_ENGINE_CHUNK_SESSION_MARKS_H_

#include <string>
#include <vector>

#include "server/engine/head/accumulation_ledger.h"

namespace lossd::engine {

// One form for equal arguments: sorted, and only what the end of a window looks at.
std::vector<SessionMarks> Canonical(std::vector<SessionMarks> marks);

// Whether two in this form are equal.
bool Same(const std::vector<SessionMarks>& a, const std::vector<SessionMarks>& b);

// The first few of them: a message is no place for thousands.
std::string ToText(const std::vector<SessionMarks>& marks);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_SESSION_MARKS_H_
