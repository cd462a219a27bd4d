/* The client, heads, weights, checkpoints. */
#include <string.h>

#include "tests/integration/c_api/check.h"

static void CheckFixedSegments(lossd_client* client) {
  lossd_head_config config;
  lossd_head* head = NULL;
  char* json = NULL;
  lossd_head_config_init(&config, sizeof config);
  CHECK(config.fixed_segments == 0);
  config.name = "heads-fixed";
  config.vocab_size = kVocab;
  config.hidden_size = kHidden;
  config.fixed_segments = 1;
  OK(lossd_client_create_head(client, &config, &head));
  OK(lossd_head_info(head, &json));
  CHECK(Holds(json, "\"fixed_segments\":true"));
  lossd_head_free(head);
  OK(lossd_client_delete_head(client, config.name, 0));
}

/* A frozen copy of "heads-1", and half of what that becomes. */
static void CheckCopies(lossd_client* client, lossd_head* head, const Problem* problem) {
  lossd_head* copy = NULL;
  char* json = NULL;
  float row[kHidden];
  float bias[1];
  uint64_t version = 0;
  OK(lossd_client_copy_head(client, "heads-1", "heads-copy", 1, 0, &version, &copy));
  CHECK(version == 1);
  OK(lossd_head_info(copy, &json));
  CHECK(strstr(json, "\"frozen\":true") != NULL);
  CHECK(Holds(json, "\"weight_version\":1"));
  OK(lossd_head_read_weights(copy, 2, 1, LOSSD_FLOAT32, row, bias, NULL, NULL, NULL));
  CHECK(memcmp(row, problem->weights + 2 * kHidden, sizeof row) == 0);
  FAILS(lossd_client_copy_head(client, "heads-1", "heads-copy", 1, 0, NULL, &copy), LOSSD_ALREADY_EXISTS,
        "heads-copy");
  version = 7;
  FAILS(lossd_client_copy_head(client, "heads-1", "heads-other", 1, 0, &version, &copy),
        LOSSD_FAILED_PRECONDITION, "source_version is 7");
  OK(lossd_head_blend(copy, "heads-1", 0.5, 1, 1, &version));
  CHECK(version == 2);
  OK(lossd_head_blend(copy, "heads-1", 0.5, 0, 0, NULL));
  OK(lossd_client_park_head(client, "heads-copy", &json));
  CHECK(strstr(json, "\"parked_bytes\":0") == NULL);
  CHECK(Holds(json, "\"parked_bytes\":"));
  OK(lossd_client_park_head(client, "heads-copy", NULL));
  OK(lossd_head_info(copy, &json));
  CHECK(strstr(json, "\"parked_bytes\":0") == NULL);
  CHECK(Holds(json, "\"parked_bytes\":"));
  FAILS(lossd_client_park_head(client, "heads-other", NULL), LOSSD_NOT_FOUND, "heads-other");
  OK(lossd_head_blend(copy, "heads-1", 0.5, 0, 0, NULL)); /* comes back for it */
  OK(lossd_head_info(copy, &json));
  CHECK(Holds(json, "\"parked_bytes\":0"));
  FAILS(lossd_head_blend(copy, "heads-1", 1.5, 0, 0, &version), LOSSD_INVALID_ARGUMENT, "decay is 1.5");
  FAILS(lossd_head_blend(head, "heads-1", 0.5, 0, 0, &version), LOSSD_INVALID_ARGUMENT, "the target too");
  lossd_head_free(copy);
  OK(lossd_client_delete_head(client, "heads-copy", 0));
}

void TestHeads(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_head* again = NULL;
  char* json = NULL;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  CHECK(lossd_api_version() == LOSSD_C_API_VERSION);
  OK(lossd_client_status(client, &json));
  CHECK(strstr(json, lossd_version()) != NULL);
  CHECK(Holds(json, "\"device\":\"cpu\""));
  head = MakeHead(client, "heads-1", &problem, kWithBias | kWithOptimizer);
  OK(lossd_client_get_head(client, "heads-1", &again));
  OK(lossd_head_info(again, &json));
  CHECK(strstr(json, "\"name\":\"heads-1\"") != NULL);
  CHECK(strstr(json, "\"kind\":\"sgd\"") != NULL);
  CHECK(strstr(json, "\"weight_type\":\"float32\"") != NULL);
  CHECK(strstr(json, "\"window_state\":\"open\"") != NULL);
  CHECK(Holds(json, "\"weight_version\":1"));
  OK(lossd_client_heads(client, &json));
  CHECK(Holds(json, "heads-1"));
  OK(lossd_client_memory(client, &json));
  CHECK(Holds(json, "\"items\":[{\"purpose\":"));
  OK(lossd_client_traffic(client, &json));
  CHECK(Holds(json, "\"bytes_sent\":"));
  /* Handles may be freed in any order. */
  lossd_head_free(again);
  CheckFixedSegments(client);
  CheckCopies(client, head, &problem);
  OK(lossd_client_delete_head(client, "heads-1", 0));
  lossd_client_free(client);
  FAILS(lossd_head_info(head, &json), LOSSD_NOT_FOUND, "heads");
  lossd_head_free(head);
}

void TestCheckpoints(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  char* json = NULL;
  float row[kHidden] = {0};
  uint64_t version = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "saved", &problem, kPlain);
  OK(lossd_head_save_checkpoint(head, "first", NULL, 0, &json));
  CHECK(strstr(json, "\"bytes_written\":") != NULL);
  CHECK(Holds(json, "\"tag\":\"first\""));
  OK(lossd_head_save_checkpoint(head, "second", NULL, 0, NULL));
  OK(lossd_client_checkpoints(client, "saved", &json));
  CHECK(strstr(json, "\"tag\":\"first\"") != NULL);
  CHECK(Holds(json, "\"tag\":\"second\""));
  OK(lossd_client_checkpoints(client, NULL, &json));
  CHECK(Holds(json, "\"head\":\"saved\""));
  problem.weights[0] = 5;
  OK(lossd_head_write_weights(head, LOSSD_FLOAT32, problem.weights, NULL, NULL, NULL, NULL));
  OK(lossd_client_restore_checkpoint(client, "saved", "first", &json));
  CHECK(Holds(json, "\"tag\":\"first\""));
  OK(lossd_head_read_weights(head, 0, 1, LOSSD_FLOAT32, row, NULL, NULL, NULL, &version));
  CHECK(row[0] != 5 && version != 0);
  OK(lossd_client_restore_checkpoint(client, "saved", NULL, NULL));
  FAILS(lossd_client_restore_checkpoint(client, "saved", "third", &json), LOSSD_NOT_FOUND, "third");
  OK(lossd_client_delete_checkpoint(client, "saved", "first", &json));
  CHECK(strstr(json, "\"tag\":\"first\"") != NULL);
  CHECK(Holds(json, "\"bytes_freed\":"));
  OK(lossd_client_delete_checkpoint(client, "saved", "second", NULL));
  FAILS(lossd_client_delete_checkpoint(client, "saved", "first", &json), LOSSD_NOT_FOUND, "first");
  lossd_head_free(head);
  lossd_client_free(client);
}

static void Note(void* user, int64_t done, int64_t total) {
  int64_t* seen = user;
  CHECK(done >= seen[0] && done <= total);
  seen[0] = done;
  seen[1] = total;
}

void TestWeights(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_weight_write* write = NULL;
  float weights[kVocab * kHidden];
  float bias[kVocab];
  uint16_t narrow[kHidden];
  int64_t seen[2] = {0, 0};
  uint64_t version = 0;
  char* json = NULL;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "weights", &problem, kWithBias);
  OK(lossd_head_read_weights(head, 0, kVocab, LOSSD_FLOAT32, weights, bias, Note, seen, &version));
  CHECK(memcmp(weights, problem.weights, sizeof weights) == 0);
  CHECK(memcmp(bias, problem.bias, sizeof bias) == 0);
  CHECK(version == 1 && seen[1] == (int64_t)sizeof weights && seen[0] == seen[1]);
  OK(lossd_head_read_weights(head, 3, 2, LOSSD_FLOAT32, weights, bias, NULL, NULL, NULL));
  CHECK(memcmp(weights, problem.weights + 3 * kHidden, 2 * kHidden * sizeof(float)) == 0);
  OK(lossd_head_read_weights(head, 5, 1, LOSSD_BFLOAT16, narrow, bias, NULL, NULL, NULL));
  CHECK(narrow[0] != 0);
  version = 7;
  FAILS(lossd_head_read_weights(head, 0, 1, LOSSD_FLOAT32, weights, bias, NULL, NULL, &version),
        LOSSD_FAILED_PRECONDITION, "version");

  OK(lossd_head_begin_write(head, "two parts", 1, &write));
  OK(lossd_weight_write_rows(write, 0, 20, LOSSD_FLOAT32, problem.weights, problem.bias, NULL, NULL));
  FAILS(lossd_weight_write_commit(write, &version), LOSSD_FAILED_PRECONDITION, "20");
  memset(seen, 0, sizeof seen);
  OK(lossd_weight_write_rows(write, 20, kVocab - 20, LOSSD_FLOAT32, problem.weights + 20 * kHidden,
                             problem.bias + 20, Note, seen));
  FAILS(lossd_head_begin_write(head, "another", 0, &write), LOSSD_FAILED_PRECONDITION, "another");
  OK(lossd_weight_write_commit(write, &version));
  CHECK(version == 2);
  lossd_weight_write_free(write);

  /* The driver has put such a file into the server's folder. */
  OK(lossd_head_load_weights(head, "weights.safetensors", NULL, "bias", NULL, NULL, &json));
  CHECK(strstr(json, "\"weight_version\":3") != NULL);
  CHECK(Holds(json, "\"tensor\":\"lm_head.weight\""));
  OK(lossd_head_read_weights(head, 0, kVocab, LOSSD_FLOAT32, weights, bias, NULL, NULL, NULL));
  CHECK(weights[0] == 2 && bias[kVocab - 1] == 3);
  OK(lossd_client_delete_head(client, "weights", 0));
  lossd_head_free(head);
  lossd_client_free(client);
}
