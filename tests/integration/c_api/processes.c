/* Several threads, several processes, and servers that go away; c_api_test.py starts and kills them. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/c_api/check.h"

enum { kThreads = 2, kBatches = 20 };

typedef struct Work {
  const Problem* problem;
  const lossd_head* head;
  lossd_session* session; /* shared */
  lossd_session* own;
} Work;

static void* RunWork(void* argument) {
  Work* work = argument;
  const lossd_batch batch = BatchOf(work->problem);
  lossd_result result;
  char* json = NULL;
  int i = 0;
  lossd_result_init(&result, sizeof result);
  for (i = 0; i < kBatches; ++i) {
    OK(lossd_session_compute(work->session, &batch, NULL, &result));
    NEAR(result.loss, work->problem->loss);
    OK(lossd_session_compute(work->own, &batch, NULL, &result));
    NEAR(result.loss, work->problem->loss);
    OK(lossd_head_info(work->head, &json));
    CHECK(Holds(json, "threads"));
    CHECK(Holds(MarksOf(work->session), "session_id"));
  }
  return NULL;
}

void TestThreads(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* shared = NULL;
  pthread_t threads[kThreads];
  Work work[kThreads];
  lossd_flush_options options;
  float dw[kVocab * kHidden];
  float db[kVocab];
  char* marks[kThreads + 1];
  int i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "threads", &problem, kWithBias);
  shared = OpenSession(head);
  for (i = 0; i < kThreads; ++i) {
    work[i].problem = &problem;
    work[i].head = head;
    work[i].session = shared;
    work[i].own = OpenSession(head);
    CHECK(pthread_create(&threads[i], NULL, RunWork, &work[i]) == 0);
  }
  for (i = 0; i < kThreads; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    marks[i] = MarksOf(work[i].own);
  }
  marks[kThreads] = MarksOf(shared);
  lossd_flush_options_init(&options, sizeof options);
  options.gradient = dw;
  options.bias_gradient = db;
  OK(lossd_head_flush(head, &options, (const char* const*)marks, kThreads + 1, NULL));
  for (i = 0; i < kVocab; ++i) NEAR(db[i], 2 * kThreads * kBatches * problem.db[i]);
  for (i = 0; i <= kThreads; ++i) lossd_string_free(marks[i]);
  for (i = 0; i < kThreads; ++i) lossd_session_free(work[i].own);
  OK(lossd_client_delete_head(client, "threads", 0));
  lossd_session_free(shared);
  lossd_head_free(head);
  lossd_client_free(client);
}

/* One process adds to a window and prints its marks; the session lives on. */
void TestContribute(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  char* marks = NULL;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "shared", &problem, kWithBias | kWithOptimizer);
  session = OpenSession(head);
  Compute(session, &problem);
  marks = MarksOf(session);
  puts(marks);
  lossd_string_free(marks);
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

/* The other one adds as much, and takes the step of both: its argument is what the first one printed. */
void TestStepFor(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_step_options options;
  float bias[kVocab];
  float weights[kVocab * kHidden];
  const char* marks[2] = {NULL, NULL};
  char* own = NULL;
  int i = 0;
  CHECK(count == 1);
  MakeProblem(&problem);
  OK(lossd_client_get_head(client, "shared", &head));
  session = OpenSession(head);
  Compute(session, &problem);
  own = MarksOf(session);
  marks[0] = own;
  marks[1] = arguments[0];
  lossd_step_options_init(&options, sizeof options);
  options.learning_rate = 1;
  FAILS(lossd_head_apply_step(head, &options, marks, 1, NULL), LOSSD_FAILED_PRECONDITION, "session");
  OK(lossd_head_apply_step(head, &options, marks, 2, NULL));
  OK(lossd_head_read_weights(head, 0, kVocab, LOSSD_FLOAT32, weights, bias, NULL, NULL, NULL));
  for (i = 0; i < kVocab; ++i) NEAR(bias[i], problem.bias[i] - 2 * problem.db[i]);
  lossd_string_free(own);
  OK(lossd_client_delete_head(client, "shared", 0));
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

/* Says that it is ready for the server to be killed, and waits until that is done. */
static void WaitForTheKill(void) {
  puts("ready");
  fflush(stdout);
  CHECK(getchar() == '\n');
}

void TestWindowLost(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_batch batch;
  lossd_flush_options options;
  char* marks = NULL;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "lost", &problem, kPlain);
  session = OpenSession(head);
  Compute(session, &problem);
  WaitForTheKill(); /* another server is there after it, without this head */
  batch = BatchOf(&problem);
  marks = MarksOf(session);
  lossd_flush_options_init(&options, sizeof options);
  options.gradient = problem.weights;
  FAILS(lossd_session_compute(session, &batch, NULL, NULL), LOSSD_WINDOW_LOST, "lost");
  FAILS(lossd_head_flush(head, &options, (const char* const*)&marks, 1, NULL), LOSSD_WINDOW_LOST, "lost");
  lossd_string_free(marks);
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

void TestServerGone(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = NULL;
  lossd_client* other = NULL;
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_client_options options;
  lossd_batch batch;
  char* json = NULL;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  lossd_client_options_init(&options, sizeof options);
  options.reconnect_timeout_seconds = 0.3;
  OK(lossd_connect(target, &options, &client));
  head = MakeHead(client, "gone", &problem, kPlain);
  session = OpenSession(head);
  Compute(session, &problem);
  WaitForTheKill();
  batch = BatchOf(&problem);
  FAILS(lossd_session_compute(session, &batch, NULL, NULL), LOSSD_UNAVAILABLE, "");
  FAILS(lossd_head_info(head, &json), LOSSD_UNAVAILABLE, "gave up");
  FAILS(lossd_connect(target, &options, &other), LOSSD_UNAVAILABLE, "gave up");
  CHECK(json == NULL && other == NULL);
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

void TestDrain(const char* target, int count, char** arguments) {
  lossd_client* client = Connect(target);
  (void)count, (void)arguments;
  OK(lossd_client_drain(client));
  lossd_client_free(client);
}
