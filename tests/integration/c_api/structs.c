/* Structs of callers that were compiled for another version of the library. */
#include <stddef.h>
#include <string.h>

#include "tests/integration/c_api/check.h"

/* An older caller's struct ends before `field`. */
#define SIZE_BEFORE(type, field) offsetof(type, field)
/* A newer one's has something behind what is known here. */
#define NEWER(name)             \
  typedef struct Newer_##name { \
    lossd_##name known;         \
    double added;               \
  } Newer_##name

NEWER(client_options);
NEWER(head_config);
NEWER(optimizer_config);
NEWER(session_options);
NEWER(batch);
NEWER(outputs);
NEWER(result);
NEWER(distillation);
NEWER(target_lists);
NEWER(logits);
NEWER(flush_options);
NEWER(flush_result);
NEWER(gradient_stats);
NEWER(step_options);
NEWER(step_result);

typedef struct Fixture {
  Problem problem;
  lossd_client* client;
  lossd_head* head;
  lossd_session* session;
} Fixture;

static void CheckInit(void) {
  Newer_batch newer;
  union {
    lossd_step_options options;
    unsigned char bytes[sizeof(lossd_step_options)];
  } older;
  size_t i = 0;
  memset(&newer, 0xAB, sizeof newer);
  lossd_batch_init((lossd_batch*)&newer, sizeof newer);
  CHECK(newer.known.struct_size == sizeof newer);
  CHECK(newer.known.ignore_index == -100 && newer.added == 0);
  memset(&older, 0xAB, sizeof older);
  lossd_step_options_init(&older.options, SIZE_BEFORE(lossd_step_options, weight_decay));
  CHECK(older.options.struct_size == SIZE_BEFORE(lossd_step_options, weight_decay));
  CHECK(older.options.gradient_scale == 1);
  for (i = SIZE_BEFORE(lossd_step_options, weight_decay); i < sizeof older; ++i) {
    CHECK(older.bytes[i] == 0xAB);
  }
}

#define REFUSED(name, call)                                                       \
  do {                                                                            \
    Newer_##name newer;                                                           \
    lossd_##name* given = &newer.known;                                           \
    size_t sizes[5] = {sizeof newer, 0, 4, sizeof(lossd_##name) - 1, (size_t)-8}; \
    size_t i = 0;                                                                 \
    lossd_##name##_init(given, sizeof newer);                                     \
    for (i = 0; i < 5; ++i) {                                                     \
      given->struct_size = sizes[i];                                              \
      FAILS(call, LOSSD_INVALID_ARGUMENT, "struct_size is");                      \
    }                                                                             \
  } while (0)

static void CheckRefusals(const char* target, Fixture* fixture) {
  lossd_client* client = NULL;
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_head_config config;
  lossd_batch batch = BatchOf(&fixture->problem);
  lossd_flush_options flush;
  lossd_step_options step;
  lossd_head_config_init(&config, sizeof config);
  lossd_flush_options_init(&flush, sizeof flush);
  lossd_step_options_init(&step, sizeof step);
  config.name = "never";
  REFUSED(client_options, lossd_connect(target, given, &client));
  REFUSED(head_config, lossd_client_create_head(fixture->client, given, &head));
  REFUSED(optimizer_config,
          (config.optimizer = given, lossd_client_create_head(fixture->client, &config, &head)));
  REFUSED(session_options, lossd_head_open_session(fixture->head, given, &session));
  REFUSED(batch, lossd_session_compute(fixture->session, given, NULL, NULL));
  REFUSED(outputs, lossd_session_compute(fixture->session, &batch, given, NULL));
  REFUSED(result, lossd_session_compute(fixture->session, &batch, NULL, given));
  REFUSED(distillation,
          (batch.distillation = given, lossd_session_compute(fixture->session, &batch, NULL, NULL)));
  batch.distillation = NULL;
  REFUSED(target_lists,
          (batch.target_lists = given, lossd_session_compute(fixture->session, &batch, NULL, NULL)));
  REFUSED(logits, lossd_head_logits(fixture->head, given, NULL));
  REFUSED(flush_options, lossd_head_flush(fixture->head, given, NULL, 0, NULL));
  flush.gradient = fixture->problem.weights;
  REFUSED(flush_result, lossd_head_flush(fixture->head, &flush, NULL, 0, given));
  REFUSED(flush_result, lossd_head_discard(fixture->head, NULL, 0, given));
  REFUSED(gradient_stats, lossd_head_gradient_stats(fixture->head, NULL, 0, 1, given));
  REFUSED(step_options, lossd_head_apply_step(fixture->head, given, NULL, 0, NULL));
  REFUSED(step_result, lossd_head_apply_step(fixture->head, &step, NULL, 0, given));
  CHECK(client == NULL && head == NULL && session == NULL);
}

/* Fields that the caller does not know have their defaults, whatever lies there. */
static void CheckOlderCallers(Fixture* fixture) {
  lossd_batch batch = BatchOf(&fixture->problem);
  lossd_result result;
  lossd_distillation soft;
  lossd_step_options step;
  lossd_step_result stepped;
  char* marks = NULL;
  int i = 0;
  batch.struct_size = SIZE_BEFORE(lossd_batch, distillation);
  batch.distillation = (const lossd_distillation*)&batch;
  batch.weight_version = 99;
  lossd_result_init(&result, SIZE_BEFORE(lossd_result, first_sequences));
  memset(result.first_sequences, 0xCD, sizeof result.first_sequences);
  OK(lossd_session_compute(fixture->session, &batch, NULL, &result));
  NEAR(result.loss, fixture->problem.loss);
  CHECK(result.struct_size == SIZE_BEFORE(lossd_result, first_sequences));
  for (i = 0; i < LOSSD_MOST_LANES; ++i) CHECK(result.first_sequences[i] == 0xCDCDCDCDCDCDCDCDU);

  /* Not read beyond its end, where something else may lie. */
  batch = BatchOf(&fixture->problem);
  lossd_distillation_init(&soft, sizeof soft);
  soft.struct_size = SIZE_BEFORE(lossd_distillation, hidden_size);
  soft.teacher = "structs";
  soft.hidden_states = fixture->problem.hidden;
  batch.distillation = &soft;
  FAILS(lossd_session_compute(fixture->session, &batch, NULL, NULL), LOSSD_INVALID_ARGUMENT,
        "batch.distillation.hidden_states is NULL");

  lossd_step_options_init(&step, sizeof step);
  lossd_step_result_init(&stepped, SIZE_BEFORE(lossd_step_result, norm));
  step.struct_size = SIZE_BEFORE(lossd_step_options, weight_decay);
  step.weight_decay = -1; /* would be refused */
  step.learning_rate = 0.125;
  stepped.norm = -7;
  marks = MarksOf(fixture->session);
  OK(lossd_head_apply_step(fixture->head, &step, (const char* const*)&marks, 1, &stepped));
  CHECK(stepped.step == 1 && stepped.weight_version == 2 && stepped.norm == -7);
  lossd_string_free(marks);
}

void TestStructs(const char* target, int count, char** arguments) {
  Fixture fixture;
  char* json = NULL;
  (void)count, (void)arguments;
  CheckInit();
  MakeProblem(&fixture.problem);
  fixture.client = Connect(target);
  fixture.head = MakeHead(fixture.client, "structs", &fixture.problem, kWithBias | kWithOptimizer);
  fixture.session = OpenSession(fixture.head);
  CheckRefusals(target, &fixture);
  OK(lossd_head_info(fixture.head, &json));
  CHECK(strstr(json, "\"generation\":1") != NULL);
  CHECK(Holds(json, "\"window_tokens\":0"));
  CheckOlderCallers(&fixture);
  OK(lossd_client_delete_head(fixture.client, "structs", 1));
  lossd_session_free(fixture.session);
  lossd_head_free(fixture.head);
  lossd_client_free(fixture.client);
}
