// A kernel that fails, after which the process can use the device no more.
#ifndef LOSSD_TESTS_GPU_TRAP_H_
#define LOSSD_TESTS_GPU_TRAP_H_

namespace lossd::testing {

// Does not wait for it.
void BreakDevice();

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_GPU_TRAP_H_
