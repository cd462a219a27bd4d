/* The gradient window: flushed into memory and into a callback, looked at, consumed by steps. */
#include <stddef.h>
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
  /* Nobody could end a flush whose id is not told. */
  FAILS(Flush(&window, &options, NULL), LOSSD_INVALID_ARGUMENT, "result is NULL");
  result.struct_size = offsetof(lossd_flush_result, flush_id) + 8;
  FAILS(Flush(&window, &options, &result), LOSSD_INVALID_ARGUMENT, "flush_id");
  result.struct_size = sizeof result;
  CHECK(frozen == 0);
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

/* 6 MiB of fp32, which a server sends in pieces of 2. */
enum { kManyRows = 6000, kManyColumns = 256 };

typedef struct Landing {
  float dw[kManyRows * kManyColumns];
  float db[kManyRows];
  int64_t next_row;
  int64_t calls;
  int64_t refused_call; /* -1: none */
} Landing;

static int32_t Land(void* user, int64_t first_row, int64_t rows, const void* gradient, const float* bias) {
  Landing* landing = user;
  CHECK(first_row == landing->next_row && rows > 0 && first_row + rows <= kManyRows);
  if (landing->calls == landing->refused_call) return 17;
  memcpy(landing->dw + first_row * kManyColumns, gradient, (size_t)rows * kManyColumns * sizeof(float));
  CHECK(bias != NULL);
  memcpy(landing->db + first_row, bias, (size_t)rows * sizeof(float));
  landing->next_row += rows;
  ++landing->calls;
  return 0;
}

static int32_t Confirm(void* user) {
  const Landing* landing = user;
  return landing->next_row == kManyRows ? 1 : 0;
}

static int32_t Refuse(void* user) {
  (void)user;
  return 0;
}

/* A head of zeros: every class is as probable as any other. */
static void OpenMany(Window* window, const char* target) {
  lossd_head_config config;
  float* zeros = calloc((size_t)kManyRows * kManyColumns, sizeof(float));
  window->name = "sink";
  window->client = Connect(target);
  lossd_head_config_init(&config, sizeof config);
  config.name = window->name;
  config.vocab_size = kManyRows;
  config.hidden_size = kManyColumns;
  config.weight_dtype = LOSSD_FLOAT32;
  config.bias = 1;
  OK(lossd_client_create_head(window->client, &config, &window->head));
  OK(lossd_head_write_weights(window->head, LOSSD_FLOAT32, zeros, zeros, NULL, NULL, NULL));
  window->session = OpenSession(window->head);
  free(zeros);
}

static const int64_t kManyLabels[] = {0, 2500, 5999}; /* one in each piece */

static void ComputeMany(const Window* window) {
  float hidden[3 * kManyColumns];
  lossd_batch batch;
  int i = 0;
  for (i = 0; i < 3 * kManyColumns; ++i) hidden[i] = 1 + (float)(i % 7);
  lossd_batch_init(&batch, sizeof batch);
  batch.tokens = 3;
  batch.labels = kManyLabels;
  batch.hidden_states = hidden;
  OK(lossd_session_compute(window->session, &batch, NULL, NULL));
}

static void CheckMany(const Landing* landing) {
  int row = 0, column = 0, token = 0;
  for (row = 0; row < kManyRows; ++row) {
    double db = 0;
    double dw[kManyColumns] = {0};
    for (token = 0; token < 3; ++token) {
      const double d = 1.0 / kManyRows - (kManyLabels[token] == row ? 1 : 0);
      db += d;
      for (column = 0; column < kManyColumns; ++column) {
        dw[column] += d * (1 + (token * kManyColumns + column) % 7);
      }
    }
    NEAR(landing->db[row], db);
    for (column = 0; column < kManyColumns; ++column) {
      NEAR(landing->dw[row * kManyColumns + column], dw[column]);
    }
  }
}

void TestSink(const char* target, int count, char** arguments) {
  static Landing landing;
  Window window;
  lossd_flush_options options;
  lossd_flush_result result;
  char* json = NULL;
  (void)count, (void)arguments;
  OpenMany(&window, target);
  ComputeMany(&window);
  landing.refused_call = 1;
  lossd_flush_options_init(&options, sizeof options);
  lossd_flush_result_init(&result, sizeof result);
  options.sink = Land;
  options.user = &landing;
  FAILS(Flush(&window, &options, &result), LOSSD_CANCELLED, "17");
  CHECK(landing.calls == 1 && landing.next_row > 0 && landing.next_row < kManyRows);
  OK(lossd_head_info(window.head, &json));
  CHECK(strstr(json, "\"window_tokens\":3") != NULL);
  CHECK(Holds(json, "\"window_state\":\"open\""));
  memset(&landing, 0, sizeof landing);
  landing.refused_call = -1;
  OK(Flush(&window, &options, &result));
  CHECK(landing.next_row == kManyRows && landing.calls > 1);
  CheckMany(&landing);

  ComputeMany(&window);
  memset(&landing, 0, sizeof landing);
  landing.refused_call = -1;
  options.confirm = Refuse;
  FAILS(Flush(&window, &options, &result), LOSSD_CANCELLED, "confirm");
  CHECK(landing.next_row == kManyRows);
  memset(&landing, 0, sizeof landing);
  landing.refused_call = -1;
  options.confirm = Confirm;
  OK(Flush(&window, &options, &result));
  CHECK(result.window_tokens == 3);
  options.confirm = NULL;

  options.gradient = landing.dw;
  FAILS(Flush(&window, &options, &result), LOSSD_INVALID_ARGUMENT, "sink");
  options.gradient = NULL;
  options.bias_gradient = landing.db;
  FAILS(Flush(&window, &options, &result), LOSSD_INVALID_ARGUMENT, "bias_gradient");
  options.sink = NULL;
  FAILS(Flush(&window, &options, &result), LOSSD_INVALID_ARGUMENT, "gradient");
  Close(&window);
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
  /* Nothing was added to the next one. */
  options.generation = 2;
  OK(lossd_head_apply_step(window.head, &options, NULL, 0, &result));
  CHECK(result.skipped == 1 && result.step == 1 && result.weight_version == 2 && result.generation == 3);
  CHECK(result.window_tokens == 0 && result.non_finite == 0);
  options.generation = 9;
  FAILS(lossd_head_apply_step(window.head, &options, (const char* const*)&marks, 1, &result), LOSSD_ABORTED,
        "generation is 9");
  lossd_string_free(marks);
  Close(&window);
}
