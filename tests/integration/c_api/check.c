#include "tests/integration/c_api/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void Check(int holds, const char* what, const char* file, int line) {
  if (holds) return;
  fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
  exit(1);
}

void CheckOk(lossd_status* status, const char* what, const char* file, int line) {
  if (status == NULL) return;
  fprintf(stderr, "%s:%d: %s: code %d: %s\n", file, line, what, (int)lossd_status_code(status),
          lossd_status_message(status));
  exit(1);
}

void CheckFails(lossd_status* status, int32_t code, const char* words, const char* what, const char* file,
                int line) {
  if (status == NULL || lossd_status_code(status) != code ||
      strstr(lossd_status_message(status), words) == NULL) {
    fprintf(stderr, "%s:%d: %s: expected code %d with '%s', got %d: %s\n", file, line, what, (int)code, words,
            (int)lossd_status_code(status), lossd_status_message(status));
    exit(1);
  }
  lossd_status_free(status);
}

void CheckNear(double value, double expected, const char* what, const char* file, int line) {
  if (fabs(value - expected) <= 1e-5 * fmax(1, fabs(expected))) return;
  fprintf(stderr, "%s:%d: %s is %.9g; expected %.9g\n", file, line, what, value, expected);
  exit(1);
}

int Holds(char* text, const char* words) {
  const int holds = text != NULL && strstr(text, words) != NULL;
  if (!holds) fprintf(stderr, "'%s' is not in: %s\n", words, text == NULL ? "NULL" : text);
  lossd_string_free(text);
  return holds;
}

static float Wave(int i, int period) { return (float)sin(0.7 * i + 0.1 * (i % period)) * 0.5F; }

/* Adds one token's part to the results. */
static void Solve(Problem* problem, int token) {
  double logits[kVocab];
  double largest = -1e30;
  double sum = 0;
  int v = 0;
  int h = 0;
  const float* x = problem->hidden + token * kHidden;
  for (v = 0; v < kVocab; ++v) {
    logits[v] = problem->bias[v];
    for (h = 0; h < kHidden; ++h) logits[v] += (double)x[h] * problem->weights[v * kHidden + h];
    if (logits[v] > largest) largest = logits[v];
  }
  for (v = 0; v < kVocab; ++v) sum += exp(logits[v] - largest);
  problem->losses[token] = log(sum) + largest - logits[problem->labels[token]];
  problem->loss += problem->losses[token];
  for (v = 0; v < kVocab; ++v) {
    const double d = exp(logits[v] - largest) / sum - (v == problem->labels[token] ? 1 : 0);
    problem->db[v] += d;
    for (h = 0; h < kHidden; ++h) {
      problem->dw[v * kHidden + h] += d * x[h];
      problem->dx[token * kHidden + h] += d * problem->weights[v * kHidden + h];
    }
  }
}

void MakeProblem(Problem* problem) {
  int i = 0;
  memset(problem, 0, sizeof *problem);
  for (i = 0; i < kVocab * kHidden; ++i) problem->weights[i] = Wave(i, 5);
  for (i = 0; i < kVocab; ++i) problem->bias[i] = Wave(i, 3);
  for (i = 0; i < kTokens * kHidden; ++i) problem->hidden[i] = Wave(i, 7);
  for (i = 0; i < kTokens; ++i) problem->labels[i] = i == kIgnored ? -100 : (i * 11) % kVocab;
  for (i = 0; i < kTokens; ++i) {
    if (i != kIgnored) Solve(problem, i);
  }
}

lossd_client* Connect(const char* target) {
  lossd_client* client = NULL;
  OK(lossd_connect(target, NULL, &client));
  CHECK(client != NULL);
  return client;
}

lossd_head* MakeHead(lossd_client* client, const char* name, const Problem* problem, int what) {
  lossd_head* head = NULL;
  lossd_head_config config;
  lossd_optimizer_config optimizer;
  uint64_t version = 0;
  lossd_head_config_init(&config, sizeof config);
  lossd_optimizer_config_init(&optimizer, sizeof optimizer);
  optimizer.kind = LOSSD_OPTIMIZER_SGD;
  config.name = name;
  config.vocab_size = kVocab;
  config.hidden_size = kHidden;
  config.weight_dtype = LOSSD_FLOAT32;
  config.bias = (what & kWithBias) != 0;
  if ((what & kWithOptimizer) != 0) config.optimizer = &optimizer;
  OK(lossd_client_create_head(client, &config, &head));
  OK(lossd_head_write_weights(head, LOSSD_FLOAT32, problem->weights, config.bias ? problem->bias : NULL, NULL,
                              NULL, &version));
  CHECK(version == 1);
  return head;
}

lossd_session* OpenSession(const lossd_head* head) {
  lossd_session* session = NULL;
  OK(lossd_head_open_session(head, NULL, &session));
  return session;
}

lossd_batch BatchOf(const Problem* problem) {
  lossd_batch batch;
  lossd_batch_init(&batch, sizeof batch);
  batch.tokens = kTokens;
  batch.labels = problem->labels;
  batch.hidden_states = problem->hidden;
  return batch;
}

void Compute(lossd_session* session, const Problem* problem) {
  const lossd_batch batch = BatchOf(problem);
  OK(lossd_session_compute(session, &batch, NULL, NULL));
}

char* MarksOf(const lossd_session* session) {
  char* marks = NULL;
  OK(lossd_session_marks(session, &marks));
  return marks;
}
