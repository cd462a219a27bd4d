/* The gradient window: flushed into memory and into a callback, looked at, consumed by steps. */
#include <stdlib.h>
#include <string.h>

#include "tests/integration/c_api/check.h"

typedef struct Window {
  Problem problem;
  lossd_client* client;
  lossd_head* head;
  lossd_session* session;
  const char* name;
} Window;

static void Open(Window* window, const char* target, const char* name, int what) {
  window->name = name;
  MakeProblem(&window->problem);
  window->client = Connect(target);
  window->head = MakeHead(window->client, name, &window->problem, what);
  window->session = OpenSession(window->head);
}

static void Close(Window* window) {
  OK(lossd_client_delete_head(window->client, window->name, 1));
  lossd_client_free(window->client);
  lossd_head_free(window->head);
  lossd_session_free(window->session);
}

static lossd_status* Flush(Window* window, const lossd_flush_options* options, lossd_flush_result* result) {
  char* marks = MarksOf(window->session);
  const char* const all[] = {marks};
  lossd_status* status = lossd_head_flush(window->head, options, all, 1, result);
  lossd_string_free(marks);
  return status;
}

static void CheckGradient(const Problem* problem, const float* dw, const float* db, double scale) {
  int i = 0;
  for (i = 0; i < kVocab * kHidden; ++i) NEAR(dw[i], scale * problem->dw[i]);
  for (i = 0; i < kVocab; ++i) NEAR(db[i], scale * problem->db[i]);
}

static void CountFrozen(void* user) { ++*(int*)user; }

void TestFlush(const char* target, int count, char** arguments) {
  Window window;
  lossd_flush_options options;
  lossd_flush_result result;
  float dw[kVocab * kHidden];
  float db[kVocab];
  uint16_t narrow[kVocab * kHidden];
  int frozen = 0;
  char* marks = NULL;
  char* json = NULL;
  (void)count, (void)arguments;
  Open(&window, target, "flush", kWithBias);
  Compute(window.session, &window.problem);
  lossd_flush_options_init(&options, sizeof options);
  lossd_flush_result_init(&result, sizeof result);
  options.gradient = dw;
  options.bias_gradient = db;
  options.gradient_scale = 0.5F;
  options.leave_frozen = 1;
  options.on_frozen = CountFrozen;
  options.user = &frozen;
  OK(Flush(&window, &options, &result));
  CheckGradient(&window.problem, dw, db, 0.5);
  CHECK(frozen == 1 && result.rows == kVocab && result.columns == kHidden && result.generation == 1);
  CHECK(result.norm > 0 && result.bias_norm > 0 && result.non_finite == 0);
  CHECK(result.window_tokens == kTokens - 1 && strlen(result.flush_id) > 0);
  OK(lossd_head_abort_flush(window.head, result.flush_id));

  options.dtype = LOSSD_BFLOAT16;
  options.gradient = narrow;
  OK(Flush(&window, &options, &result));
  OK(lossd_head_commit_flush(window.head, result.flush_id));
  OK(lossd_head_commit_flush(window.head, result.flush_id));
  FAILS(lossd_head_commit_flush(window.head, "nobody's"), LOSSD_ABORTED, "nobody's");

  /* A window that nobody wants. */
  Compute(window.session, &window.problem);
  marks = MarksOf(window.session);
  OK(lossd_head_discard(window.head, (const char* const*)&marks, 1, &result));
  CHECK(result.window_tokens == kTokens - 1 && result.generation == 2);
  lossd_string_free(marks);
  OK(lossd_head_info(window.head, &json));
  CHECK(strstr(json, "\"window_tokens\":0") != NULL);
  CHECK(Holds(json, "\"generation\":3"));
  Close(&window);
}

typedef struct Landing {
  float dw[kVocab * kHidden];
  float db[kVocab];
  int64_t next_row;
  int64_t calls;
  int64_t refused_row; /* -1: none */
} Landing;

static int32_t Land(void* user, int64_t first_row, int64_t rows, const void* gradient, const float* bias) {
  Landing* landing = user;
  CHECK(first_row == landing->next_row && rows > 0 && first_row + rows <= kVocab);
  if (landing->refused_row >= 0 && first_row + rows > landing->refused_row) return 17;
  memcpy(landing->dw + first_row * kHidden, gradient, (size_t)rows * kHidden * sizeof(float));
  CHECK(bias != NULL);
  memcpy(landing->db + first_row, bias, (size_t)rows * sizeof(float));
  landing->next_row += rows;
  ++landing->calls;
  return 0;
}

void TestSink(const char* target, int count, char** arguments) {
  Window window;
  Landing landing;
  lossd_client_options small;
  lossd_flush_options options;
  lossd_flush_result result;
  lossd_client* client = NULL;
  char* json = NULL;
  (void)count, (void)arguments;
  Open(&window, target, "sink", kWithBias);
  /* Through a client whose messages have a few rows each. */
  lossd_client_options_init(&small, sizeof small);
  small.transfer_bytes = 5 * kHidden * (int64_t)sizeof(float);
  OK(lossd_connect(target, &small, &client));
  lossd_head_free(window.head);
  OK(lossd_client_get_head(client, "sink", &window.head));
  Compute(window.session, &window.problem);
  memset(&landing, 0, sizeof landing);
  landing.refused_row = 20;
  lossd_flush_options_init(&options, sizeof options);
  lossd_flush_result_init(&result, sizeof result);
  options.sink = Land;
  options.user = &landing;
  FAILS(Flush(&window, &options, &result), LOSSD_CANCELLED, "17");
  OK(lossd_head_info(window.head, &json));
  CHECK(strstr(json, "\"window_tokens\":8") != NULL);
  CHECK(Holds(json, "\"window_state\":\"open\""));
  memset(&landing, 0, sizeof landing);
  landing.refused_row = -1;
  OK(Flush(&window, &options, &result));
  CHECK(landing.next_row == kVocab && landing.calls >= 1);
  CheckGradient(&window.problem, landing.dw, landing.db, 1);

  options.gradient = landing.dw;
  FAILS(Flush(&window, &options, &result), LOSSD_INVALID_ARGUMENT, "sink");
  options.gradient = NULL;
  options.bias_gradient = landing.db;
  FAILS(Flush(&window, &options, &result), LOSSD_INVALID_ARGUMENT, "bias_gradient");
  options.sink = NULL;
  FAILS(Flush(&window, &options, &result), LOSSD_INVALID_ARGUMENT, "gradient");
  Close(&window);
  lossd_client_free(client);
}

void TestStep(const char* target, int count, char** arguments) {
  Window window;
  lossd_gradient_stats stats;
  lossd_step_options options;
  lossd_step_result result;
  float weights[kVocab * kHidden];
  float bias[kVocab];
  char* marks = NULL;
  int i = 0;
  (void)count, (void)arguments;
  Open(&window, target, "step", kWithBias | kWithOptimizer);
  Compute(window.session, &window.problem);
  marks = MarksOf(window.session);
  lossd_gradient_stats_init(&stats, sizeof stats);
  OK(lossd_head_gradient_stats(window.head, (const char* const*)&marks, 1, 1, &stats));
  CHECK(stats.norm > 0 && stats.bias_norm > 0 && stats.largest > 0 && stats.non_finite == 0);
  lossd_step_options_init(&options, sizeof options);
  lossd_step_result_init(&result, sizeof result);
  options.learning_rate = 0.5;
  options.gradient_scale = 0.25;
  OK(lossd_head_apply_step(window.head, &options, (const char* const*)&marks, 1, &result));
  CHECK(result.step == 1 && result.weight_version == 2 && result.generation == 2 && result.skipped == 0);
  NEAR(result.norm, 0.25 * stats.norm);
  OK(lossd_head_read_weights(window.head, 0, kVocab, LOSSD_FLOAT32, weights, bias, NULL, NULL, NULL));
  for (i = 0; i < kVocab * kHidden; ++i) {
    NEAR(weights[i], window.problem.weights[i] - 0.125 * window.problem.dw[i]);
  }
  for (i = 0; i < kVocab; ++i) NEAR(bias[i], window.problem.bias[i] - 0.125 * window.problem.db[i]);
  /* The same window again answers the same. */
  options.has_generation = 1;
  options.generation = 1;
  OK(lossd_head_apply_step(window.head, &options, (const char* const*)&marks, 1, &result));
  CHECK(result.step == 1 && result.weight_version == 2);
  options.generation = 9;
  FAILS(lossd_head_apply_step(window.head, &options, (const char* const*)&marks, 1, &result), LOSSD_ABORTED,
        "generation is 9");
  lossd_string_free(marks);
  Close(&window);
}
