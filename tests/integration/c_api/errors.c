/* Arguments that cannot work: named, and without consequences. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/c_api/check.h"

#define IS_NULL(call, name) FAILS(call, LOSSD_INVALID_ARGUMENT, name " is NULL")

/* What takes NULL for an answer. */
static void CheckHarmlessNulls(void) {
  CHECK(lossd_status_code(NULL) == LOSSD_OK);
  CHECK(strcmp(lossd_status_message(NULL), "") == 0);
  lossd_status_free(NULL);
  lossd_string_free(NULL);
  lossd_client_free(NULL);
  lossd_head_free(NULL);
  lossd_session_free(NULL);
  lossd_weight_write_free(NULL);
  lossd_region_free(NULL);
  lossd_batch_init(NULL, sizeof(lossd_batch));
  CHECK(strcmp(lossd_session_client_key(NULL), "") == 0);
  CHECK(lossd_session_reconnects(NULL) == 0);
  CHECK(lossd_region_data(NULL) == NULL && lossd_region_size(NULL) == 0);
}

static void CheckClientNulls(const char* target, lossd_client* client) {
  lossd_client* other = NULL;
  lossd_head* head = NULL;
  lossd_region* region = NULL;
  lossd_head_config config;
  char* json = NULL;
  lossd_head_config_init(&config, sizeof config);
  IS_NULL(lossd_connect(NULL, NULL, &other), "target");
  IS_NULL(lossd_connect(target, NULL, NULL), "client");
  IS_NULL(lossd_client_status(NULL, &json), "client");
  IS_NULL(lossd_client_status(client, NULL), "json");
  IS_NULL(lossd_client_memory(NULL, &json), "client");
  IS_NULL(lossd_client_heads(client, NULL), "json");
  IS_NULL(lossd_client_traffic(NULL, &json), "client");
  IS_NULL(lossd_client_drain(NULL), "client");
  IS_NULL(lossd_client_delete_head(NULL, "h", 0), "client");
  IS_NULL(lossd_client_delete_head(client, NULL, 0), "name");
  IS_NULL(lossd_client_restore_checkpoint(NULL, "h", "t", &json), "client");
  IS_NULL(lossd_client_restore_checkpoint(client, NULL, "t", &json), "head");
  IS_NULL(lossd_client_checkpoints(client, "h", NULL), "json");
  IS_NULL(lossd_client_delete_checkpoint(NULL, "h", "t", &json), "client");
  IS_NULL(lossd_client_delete_checkpoint(client, NULL, "t", &json), "head");
  IS_NULL(lossd_client_delete_checkpoint(client, "h", NULL, &json), "tag");
  IS_NULL(lossd_client_create_region(NULL, LOSSD_REGION_SYSTEM, 1, &region), "client");
  IS_NULL(lossd_client_create_region(client, LOSSD_REGION_SYSTEM, 1, NULL), "region");
  IS_NULL(lossd_region_copy_in(NULL, 0, target, 1), "region");
  IS_NULL(lossd_region_copy_out(NULL, 0, &config, 1), "region");
  IS_NULL(lossd_client_create_head(NULL, &config, &head), "client");
  IS_NULL(lossd_client_create_head(client, NULL, &head), "config");
  IS_NULL(lossd_client_create_head(client, &config, NULL), "head");
  IS_NULL(lossd_client_create_head(client, &config, &head), "config.name");
  IS_NULL(lossd_client_copy_head(NULL, "a", "b", 0, 0, NULL, &head), "client");
  IS_NULL(lossd_client_copy_head(client, NULL, "b", 0, 0, NULL, &head), "source");
  IS_NULL(lossd_client_copy_head(client, "a", NULL, 0, 0, NULL, &head), "name");
  IS_NULL(lossd_client_copy_head(client, "a", "b", 0, 0, NULL, NULL), "copy");
  IS_NULL(lossd_client_park_head(NULL, "a", &json), "client");
  IS_NULL(lossd_client_park_head(client, NULL, &json), "name");
  IS_NULL(lossd_client_get_head(client, NULL, &head), "name");
  IS_NULL(lossd_client_get_head(client, "h", NULL), "head");
  CHECK(other == NULL && head == NULL && region == NULL && json == NULL);
}

static void CheckHeadNulls(const lossd_head* head) {
  lossd_session* session = NULL;
  lossd_weight_write* write = NULL;
  lossd_flush_options flush;
  lossd_step_options step;
  lossd_gradient_stats stats;
  const char* const none[] = {NULL};
  float values[kVocab * kHidden];
  char* json = NULL;
  lossd_flush_options_init(&flush, sizeof flush);
  lossd_step_options_init(&step, sizeof step);
  lossd_gradient_stats_init(&stats, sizeof stats);
  flush.gradient = values;
  IS_NULL(lossd_head_info(NULL, &json), "head");
  IS_NULL(lossd_head_info(head, NULL), "json");
  IS_NULL(lossd_head_write_weights(NULL, 0, values, NULL, NULL, NULL, NULL), "head");
  IS_NULL(lossd_head_write_weights(head, 0, NULL, NULL, NULL, NULL, NULL), "weights");
  IS_NULL(lossd_head_read_weights(NULL, 0, 1, 0, values, NULL, NULL, NULL, NULL), "head");
  IS_NULL(lossd_head_read_weights(head, 0, 1, 0, NULL, NULL, NULL, NULL, NULL), "weights");
  IS_NULL(lossd_head_load_weights(NULL, "p", NULL, NULL, NULL, NULL, NULL), "head");
  IS_NULL(lossd_head_load_weights(head, NULL, NULL, NULL, NULL, NULL, NULL), "path");
  IS_NULL(lossd_head_begin_write(NULL, "k", 1, &write), "head");
  IS_NULL(lossd_head_begin_write(head, NULL, 1, &write), "write_key");
  IS_NULL(lossd_head_begin_write(head, "k", 1, NULL), "write");
  IS_NULL(lossd_weight_write_rows(NULL, 0, 1, 0, values, NULL, NULL, NULL), "write");
  IS_NULL(lossd_weight_write_commit(NULL, NULL), "write");
  IS_NULL(lossd_head_blend(NULL, "a", 0.5, 0, 0, NULL), "head");
  IS_NULL(lossd_head_blend(head, NULL, 0.5, 0, 0, NULL), "source");
  IS_NULL(lossd_head_save_checkpoint(NULL, "t", NULL, 0, NULL), "head");
  IS_NULL(lossd_head_save_checkpoint(head, NULL, NULL, 0, NULL), "tag");
  IS_NULL(lossd_head_save_checkpoint(head, "t", NULL, 1, NULL), "marks");
  IS_NULL(lossd_head_open_session(NULL, NULL, &session), "head");
  IS_NULL(lossd_head_open_session(head, NULL, NULL), "session");
  IS_NULL(lossd_head_flush(NULL, &flush, NULL, 0, NULL), "head");
  IS_NULL(lossd_head_flush(head, NULL, NULL, 0, NULL), "options");
  IS_NULL(lossd_head_flush(head, &flush, NULL, 1, NULL), "marks");
  IS_NULL(lossd_head_flush(head, &flush, none, 1, NULL), "marks[0]");
  IS_NULL(lossd_head_discard(NULL, NULL, 0, NULL), "head");
  IS_NULL(lossd_head_discard(head, none, 1, NULL), "marks[0]");
  IS_NULL(lossd_head_commit_flush(NULL, "f"), "head");
  IS_NULL(lossd_head_commit_flush(head, NULL), "flush_id");
  IS_NULL(lossd_head_abort_flush(NULL, "f"), "head");
  IS_NULL(lossd_head_abort_flush(head, NULL), "flush_id");
  IS_NULL(lossd_head_gradient_stats(NULL, NULL, 0, 1, &stats), "head");
  IS_NULL(lossd_head_gradient_stats(head, NULL, 0, 1, NULL), "stats");
  IS_NULL(lossd_head_apply_step(NULL, &step, NULL, 0, NULL), "head");
  IS_NULL(lossd_head_apply_step(head, NULL, NULL, 0, NULL), "options");
  IS_NULL(lossd_head_apply_step(head, &step, NULL, 2, NULL), "marks");
}

void TestNulls(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_batch batch;
  uint64_t sequence = 1;
  char* json = NULL;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  CheckHarmlessNulls();
  CheckClientNulls(target, client);
  head = MakeHead(client, "nulls", &problem, kPlain);
  CheckHeadNulls(head);
  session = OpenSession(head);
  batch = BatchOf(&problem);
  IS_NULL(lossd_session_compute(NULL, &batch, NULL, NULL), "session");
  IS_NULL(lossd_session_compute(session, NULL, NULL, NULL), "batch");
  batch.labels = NULL;
  IS_NULL(lossd_session_compute(session, &batch, NULL, NULL), "batch.labels");
  batch = BatchOf(&problem);
  batch.hidden_states = NULL;
  IS_NULL(lossd_session_compute(session, &batch, NULL, NULL), "batch.hidden_states");
  IS_NULL(lossd_session_close(NULL), "session");
  IS_NULL(lossd_session_lane_places(NULL, &json), "session");
  IS_NULL(lossd_session_lane_places(session, NULL), "json");
  IS_NULL(lossd_session_marks(NULL, &json), "session");
  IS_NULL(lossd_session_marks(session, NULL), "json");
  IS_NULL(lossd_session_resume_at(NULL, &sequence, 1), "session");
  IS_NULL(lossd_session_resume_at(session, NULL, 1), "sequences");
  OK(lossd_client_delete_head(client, "nulls", 0));
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

static void CheckBatchValues(lossd_session* session, const Problem* problem) {
  lossd_batch batch = BatchOf(problem);
  lossd_outputs outputs;
  int32_t top_tokens[1];
  float top_log_probabilities[1];
  int32_t* const fields[] = {&batch.hidden_dtype, &batch.mode, &batch.reduction, &batch.class_weights,
                             &batch.bias};
  const char* const names[] = {"batch.hidden_dtype", "batch.mode", "batch.reduction", "batch.class_weights",
                               "batch.bias"};
  size_t i = 0;
  for (i = 0; i < sizeof fields / sizeof fields[0]; ++i) {
    const int32_t before = *fields[i];
    *fields[i] = 3;
    FAILS(lossd_session_compute(session, &batch, NULL, NULL), LOSSD_INVALID_ARGUMENT, names[i]);
    *fields[i] = -1;
    FAILS(lossd_session_compute(session, &batch, NULL, NULL), LOSSD_INVALID_ARGUMENT, "is -1");
    *fields[i] = before;
  }
  lossd_outputs_init(&outputs, sizeof outputs);
  outputs.dx_dtype = 3;
  FAILS(lossd_session_compute(session, &batch, &outputs, NULL), LOSSD_INVALID_ARGUMENT, "outputs.dx_dtype");
  outputs.dx_dtype = LOSSD_FLOAT32;
  outputs.top_k = 64;
  outputs.top_tokens = top_tokens;
  outputs.top_log_probabilities = top_log_probabilities;
  batch.tokens = INT64_MAX / 32;
  FAILS(lossd_session_compute(session, &batch, &outputs, NULL), LOSSD_INVALID_ARGUMENT,
        "batch.tokens is 288230376151711743 and outputs.top_k 64");
  batch.tokens = -1;
  FAILS(lossd_session_compute(session, &batch, NULL, NULL), LOSSD_INVALID_ARGUMENT, "batch.tokens is -1");
  batch.tokens = kTokens;
  batch.gradient_scale = INFINITY;
  FAILS(lossd_session_compute(session, &batch, NULL, NULL), LOSSD_INVALID_ARGUMENT, "gradient_scale");
  CHECK(Holds(MarksOf(session), "\"accepted\":0"));
}

void TestValues(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_client* other = NULL;
  lossd_head* head = NULL;
  lossd_head* unknown = NULL;
  lossd_session* session = NULL;
  lossd_session* refused = NULL;
  lossd_region* region = NULL;
  lossd_client_options connect;
  lossd_session_options open;
  lossd_head_config config;
  lossd_optimizer_config optimizer;
  lossd_logits logits;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  lossd_client_options_init(&connect, sizeof connect);
  connect.call_timeout_seconds = -1;
  FAILS(lossd_connect(target, &connect, &other), LOSSD_INVALID_ARGUMENT, "call_timeout_seconds is -1");
  lossd_client_options_init(&connect, sizeof connect);
  connect.tls_server_name = "somebody";
  FAILS(lossd_connect(target, &connect, &other), LOSSD_INVALID_ARGUMENT, "set tls to 1");
  lossd_client_options_init(&connect, sizeof connect);
  connect.token_file = "/nonexistent/token";
  FAILS(lossd_connect(target, &connect, &other), LOSSD_INVALID_ARGUMENT, "/nonexistent/token");
  FAILS(lossd_connect("lossd.invalid:1", &connect, &other), LOSSD_INVALID_ARGUMENT, "plain text");
  FAILS(lossd_connect("", NULL, &other), LOSSD_INVALID_ARGUMENT, "target is \"\"; want host:port");
  FAILS(lossd_client_get_head(client, "nobody", &unknown), LOSSD_NOT_FOUND, "nobody");
  FAILS(lossd_client_delete_head(client, "nobody", 0), LOSSD_NOT_FOUND, "nobody");
  FAILS(lossd_client_create_region(client, 2, 64, &region), LOSSD_INVALID_ARGUMENT, "kind is 2");
  lossd_head_config_init(&config, sizeof config);
  lossd_optimizer_config_init(&optimizer, sizeof optimizer);
  config.name = "values";
  config.vocab_size = -5;
  config.class_weights = problem.weights;
  FAILS(lossd_client_create_head(client, &config, &head), LOSSD_INVALID_ARGUMENT, "vocab_size");
  config.weight_dtype = 77;
  FAILS(lossd_client_create_head(client, &config, &head), LOSSD_INVALID_ARGUMENT, "weight_dtype is 77");
  config.weight_dtype = LOSSD_FLOAT32;
  config.optimizer = &optimizer;
  optimizer.kind = 4;
  FAILS(lossd_client_create_head(client, &config, &head), LOSSD_INVALID_ARGUMENT, "optimizer.kind is 4");
  head = MakeHead(client, "values", &problem, kPlain);
  FAILS(lossd_head_write_weights(head, 4, problem.weights, NULL, NULL, NULL, NULL), LOSSD_INVALID_ARGUMENT,
        "dtype is 4");
  FAILS(lossd_head_write_weights(head, 0, problem.weights, problem.bias, NULL, NULL, NULL),
        LOSSD_INVALID_ARGUMENT, "without a bias");
  FAILS(lossd_head_read_weights(head, -1, 1, 0, problem.weights, NULL, NULL, NULL, NULL),
        LOSSD_INVALID_ARGUMENT, "-1");
  lossd_session_options_init(&open, sizeof open);
  open.lanes = LOSSD_MOST_LANES + 1;
  FAILS(lossd_head_open_session(head, &open, &refused), LOSSD_INVALID_ARGUMENT, "options.lanes is 65");
  lossd_logits_init(&logits, sizeof logits);
  logits.rows = INT64_MAX / 4;
  logits.hidden_states = problem.hidden;
  logits.top_k = 32;
  FAILS(lossd_head_logits(head, &logits, NULL), LOSSD_INVALID_ARGUMENT,
        "logits.rows is 2305843009213693951 and logits.top_k 32");
  session = OpenSession(head);
  CheckBatchValues(session, &problem);
  OK(lossd_client_delete_head(client, "values", 0));
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

/* Right but for its lanes. */
#define WITH_LANES(lanes) \
  "{\"session_id\":\"s\",\"incarnation\":\"i\",\"restores\":0,\"generation\":1,\"lanes\":" lanes "}"

void TestMarks(const char* target, int count, char** arguments) {
  static const char* const kWrong[] = {
      "",
      "no JSON",
      "[]",
      "{}",
      "{\"session_id\":7,\"lanes\":[]}",
      "{\"session_id\":\"s\",\"lanes\":[]}",
      WITH_LANES("{}"),
      WITH_LANES("[7]"),
      WITH_LANES("[{\"lane\":0,\"accepted\":-1,\"applied\":0}]"),
      WITH_LANES("[{\"lane\":0,\"accepted\":1.5,\"applied\":0}]"),
      WITH_LANES("[{\"lane\":4294967296,\"accepted\":1,\"applied\":0}]"),
  };
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_flush_options options;
  const char* marks[2] = {NULL, NULL};
  char* of_session = NULL;
  lossd_session* session = NULL;
  size_t i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "marks", &problem, kPlain);
  session = OpenSession(head);
  Compute(session, &problem);
  of_session = MarksOf(session);
  lossd_flush_options_init(&options, sizeof options);
  options.gradient = problem.weights;
  marks[0] = of_session;
  for (i = 0; i < sizeof kWrong / sizeof kWrong[0]; ++i) {
    marks[1] = kWrong[i];
    FAILS(lossd_head_flush(head, &options, marks, 2, NULL), LOSSD_INVALID_ARGUMENT, "marks[1] is not what");
  }
  FAILS(lossd_head_flush(head, &options, NULL, 0, NULL), LOSSD_FAILED_PRECONDITION, "session");
  OK(lossd_head_flush(head, &options, marks, 1, NULL));
  lossd_string_free(of_session);
  OK(lossd_client_delete_head(client, "marks", 0));
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}
