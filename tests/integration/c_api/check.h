/* What tests written in C need: expectations that end the program, and a small problem to solve. */
#ifndef LOSSD_TESTS_INTEGRATION_C_API_CHECK_H_
#define LOSSD_TESTS_INTEGRATION_C_API_CHECK_H_

#include <stdint.h>

#include "lossd/c_api.h"

/* Each ends the program with 1, and says why, unless what it names is so. */
#define CHECK(condition) Check((condition), #condition, __FILE__, __LINE__)
#define OK(call) CheckOk((call), #call, __FILE__, __LINE__)
#define FAILS(call, code, words) CheckFails((call), (code), (words), #call, __FILE__, __LINE__)
#define NEAR(value, expected) CheckNear((value), (expected), #value, __FILE__, __LINE__)

void Check(int holds, const char* what, const char* file, int line);
void CheckOk(lossd_status* status, const char* what, const char* file, int line);
/* `words` must be in the message. */
void CheckFails(lossd_status* status, int32_t code, const char* words, const char* what, const char* file,
                int line);
/* To 1e-5 of the larger of `expected` and 1. */
void CheckNear(double value, double expected, const char* what, const char* file, int line);

/* Whether `words` are in the text, which is freed. */
int Holds(char* text, const char* words);

enum { kVocab = 37, kHidden = 12, kTokens = 9, kIgnored = 4 /* its label is ignored */ };

typedef struct Problem {
  float weights[kVocab * kHidden];
  float bias[kVocab];
  float hidden[kTokens * kHidden];
  int64_t labels[kTokens];
  /* What comes of it with a bias, by the definition. */
  double losses[kTokens];
  double loss;
  double dx[kTokens * kHidden];
  double dw[kVocab * kHidden];
  double db[kVocab];
} Problem;

enum { kPlain = 0, kWithBias = 1, kWithOptimizer = 2 };

void MakeProblem(Problem* problem);
lossd_client* Connect(const char* target);
/* A new fp32 head with the problem's weights; `what` are flags. */
lossd_head* MakeHead(lossd_client* client, const char* name, const Problem* problem, int what);
lossd_session* OpenSession(const lossd_head* head);
/* The problem's tokens, gradients wanted. */
lossd_batch BatchOf(const Problem* problem);
void Compute(lossd_session* session, const Problem* problem);
/* Text to be freed. */
char* MarksOf(const lossd_session* session);

/* The tests, by the names that main.c gives them; arguments as main's behind the target. */
typedef void Test(const char* target, int count, char** arguments);
Test TestHeads, TestCheckpoints, TestWeights, TestCompute, TestTokenReturns, TestDistillation,
    TestTargetLists, TestLogits, TestResume, TestFlush, TestSink, TestStep, TestRegions, TestNulls,
    TestValues, TestMarks, TestStructs, TestThreads, TestContribute, TestStepFor, TestWindowLost,
    TestServerGone, TestDrain;

#endif /* LOSSD_TESTS_INTEGRATION_C_API_CHECK_H_ */
