/* c_api_test NAME TARGET [ARGUMENT...]: one test of lossd/c_api.h against the server at TARGET. */
#include <stdio.h>
#include <string.h>

#include "tests/integration/c_api/check.h"

static const struct {
  const char* name;
  Test* test;
} kTests[] = {
    {"heads", TestHeads},
    {"checkpoints", TestCheckpoints},
    {"weights", TestWeights},
    {"compute", TestCompute},
    {"token_returns", TestTokenReturns},
    {"distillation", TestDistillation},
    {"target_lists", TestTargetLists},
    {"logits", TestLogits},
    {"resume", TestResume},
    {"flush", TestFlush},
    {"sink", TestSink},
    {"step", TestStep},
    {"regions", TestRegions},
    {"nulls", TestNulls},
    {"values", TestValues},
    {"marks", TestMarks},
    {"structs", TestStructs},
    {"threads", TestThreads},
    {"contribute", TestContribute},
    {"step_for", TestStepFor},
    {"window_lost", TestWindowLost},
    {"server_gone", TestServerGone},
    {"drain", TestDrain},
};

int main(int count, char** arguments) {
  size_t i = 0;
  for (i = 0; count >= 3 && i < sizeof kTests / sizeof kTests[0]; ++i) {
    if (strcmp(arguments[1], kTests[i].name) == 0) {
      kTests[i].test(arguments[2], count - 3, arguments + 3);
      return 0;
    }
  }
  fprintf(stderr, "usage: %s NAME TARGET [ARGUMENT...]\n", arguments[0]);
  return 2;
}
