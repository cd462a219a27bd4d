#include "tests/gpu/trap.h"

namespace lossd::testing {
namespace {

__global__ void Trap() { asm("trap;"); }

}  // namespace

void BreakDevice() { Trap<<<1, 1>>>(); }

}  // namespace lossd::testing
