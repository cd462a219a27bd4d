/* Batches through sessions, and logits. */
#include <math.h>
#include <string.h>

#include "tests/integration/c_api/check.h"

void TestCompute(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_session_options options;
  lossd_batch batch;
  lossd_outputs outputs;
  lossd_result result;
  float losses[kTokens];
  float dx[kTokens * kHidden];
  int i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "compute", &problem, kWithBias);
  lossd_session_options_init(&options, sizeof options);
  options.client_key = "the key";
  options.lanes = 2;
  OK(lossd_head_open_session(head, &options, &session));
  CHECK(strcmp(lossd_session_client_key(session), "the key") == 0);
  CHECK(lossd_session_reconnects(session) == 0);
  batch = BatchOf(&problem);
  lossd_outputs_init(&outputs, sizeof outputs);
  lossd_result_init(&result, sizeof result);
  outputs.losses = losses;
  outputs.dx = dx;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss, problem.loss);
  CHECK(result.valid_tokens == kTokens - 1 && result.weight_version == 1);
  CHECK(result.chunks == 1 && result.lanes == 2 && result.first_sequences[0] == 1);
  for (i = 0; i < kTokens; ++i) NEAR(losses[i], problem.losses[i]);
  for (i = 0; i < kTokens * kHidden; ++i) NEAR(dx[i], problem.dx[i]);

  /* What is NaN is as the head has it; another scale is another loss. */
  batch.mode = LOSSD_LOSS_ONLY;
  batch.reduction = LOSSD_MEAN;
  outputs.dx = NULL;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss, problem.loss / (kTokens - 1));
  batch.normalizer = 4;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss, problem.loss / 4);
  batch.logit_scale = 2;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  CHECK(fabs(result.loss - problem.loss / 4) > 1e-3);
  batch.logit_scale = NAN;
  batch.bias = LOSSD_IGNORE;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  CHECK(fabs(result.loss - problem.loss / 4) > 1e-3);

  batch.tokens = 0;
  batch.labels = NULL;
  batch.hidden_states = NULL;
  OK(lossd_session_compute(session, &batch, NULL, &result));
  CHECK(result.loss == 0 && result.lanes == 0);
  OK(lossd_session_close(session));
  batch = BatchOf(&problem);
  FAILS(lossd_session_compute(session, &batch, NULL, NULL), LOSSD_FAILED_PRECONDITION, "closed");
  OK(lossd_client_delete_head(client, "compute", 1));
  lossd_client_free(client);
  lossd_head_free(head);
  lossd_session_free(session);
}

void TestTokenReturns(const char* target, int count, char** arguments) {
  enum { kTop = 3 };
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_batch batch;
  lossd_outputs outputs;
  lossd_outputs gradients;
  lossd_result result;
  float losses[kTokens], lse[kTokens], z[kTokens], log_probabilities[kTokens], entropies[kTokens];
  float dx[kTokens * kHidden];
  float top[kTokens * kTop];
  float weights[kTokens];
  float upstream[kTokens];
  int64_t kept_offsets[kTokens + 1];
  int32_t kept[2 * kTokens];
  int32_t predictions[kTokens], ranks[kTokens], top_tokens[kTokens * kTop];
  int i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "returns", &problem, kWithBias);
  session = OpenSession(head);
  for (i = 0; i < kTokens; ++i) weights[i] = 2;
  for (i = 0; i < kTokens; ++i) upstream[i] = 0.5F;
  batch = BatchOf(&problem);
  batch.token_weights = weights;
  batch.lse_gradients = upstream;
  batch.lse_square_scale = 0.25F;
  batch.label_smoothing = 0;
  batch.weight_version = 1;
  lossd_outputs_init(&outputs, sizeof outputs);
  lossd_result_init(&result, sizeof result);
  outputs.losses = losses;
  outputs.log_sum_exp = lse;
  outputs.z_losses = z;
  outputs.log_probabilities = log_probabilities;
  outputs.entropies = entropies;
  outputs.predictions = predictions;
  outputs.target_ranks = ranks;
  outputs.top_k = kTop;
  outputs.top_tokens = top_tokens;
  outputs.top_log_probabilities = top;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss_sum - result.z_loss_sum, 2 * problem.loss);
  for (i = 0; i < kTokens; ++i) {
    if (i == kIgnored) {
      CHECK(losses[i] == 0 && lse[i] == 0 && predictions[i] == -1 && ranks[i] == -1);
      continue;
    }
    NEAR(log_probabilities[i], -problem.losses[i]);
    NEAR(z[i], 2 * 0.25 * (double)lse[i] * lse[i]);
    NEAR(losses[i], 2 * problem.losses[i] + z[i]);
    CHECK(entropies[i] > 0 && entropies[i] < log(kVocab) + 1e-4);
    CHECK(top_tokens[i * kTop] == predictions[i] && top[i * kTop] >= top[i * kTop + 1]);
    CHECK((ranks[i] == 0) == (predictions[i] == problem.labels[i]));
  }

  /* What is upstream of the entropies alone. */
  lossd_outputs_init(&gradients, sizeof gradients);
  gradients.dx = dx;
  for (i = 0; i < kTokens; ++i) weights[i] = 0;
  batch.lse_gradients = NULL;
  OK(lossd_session_compute(session, &batch, &gradients, &result));
  CHECK(result.valid_tokens == kTokens - 1);
  for (i = 0; i < kTokens * kHidden; ++i) CHECK(dx[i] == 0);
  batch.entropy_gradients = upstream;
  OK(lossd_session_compute(session, &batch, &gradients, &result));
  for (i = 0; i < kTokens; ++i) CHECK((dx[i * kHidden] != 0) == (i != kIgnored));

  /* Over a list of two tokens each, of which one is the label. */
  batch.entropy_gradients = NULL;
  batch.token_weights = NULL;
  batch.lse_square_scale = 0;
  for (i = 0; i < kTokens; ++i) {
    kept_offsets[i] = 2 * (int64_t)i;
    kept[2 * i] = i == kIgnored ? 0 : (int32_t)problem.labels[i];
    kept[2 * i + 1] = (kept[2 * i] + 1) % kVocab;
  }
  kept_offsets[kTokens] = 2 * (int64_t)kTokens;
  batch.kept_offsets = kept_offsets;
  batch.kept_tokens = kept;
  batch.kept_token_count = 2 * kTokens;
  lossd_outputs_init(&gradients, sizeof gradients);
  gradients.dx = dx;
  gradients.entropies = entropies;
  gradients.predictions = predictions;
  OK(lossd_session_compute(session, &batch, &gradients, &result));
  for (i = 0; i < kTokens; ++i) {
    if (i == kIgnored) continue;
    CHECK(entropies[i] > 0 && entropies[i] < log(2) + 1e-4);
    CHECK(predictions[i] == kept[2 * i] || predictions[i] == kept[2 * i + 1]);
  }
  batch.kept_token_count = 2 * kTokens - 1;
  FAILS(lossd_session_compute(session, &batch, &gradients, &result), LOSSD_INVALID_ARGUMENT, "must be equal");
  batch.kept_tokens = NULL;
  FAILS(lossd_session_compute(session, &batch, &gradients, &result), LOSSD_INVALID_ARGUMENT, "kept_tokens");
  batch.kept_offsets = NULL;
  batch.kept_token_count = 0;

  batch.weight_version = 2;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_FAILED_PRECONDITION, "version");
  outputs.top_k = 0;
  batch.weight_version = 0;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT, "top_k");
  OK(lossd_client_delete_head(client, "returns", 1));
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

void TestDistillation(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* student = NULL;
  lossd_head* teacher = NULL;
  lossd_session* session = NULL;
  lossd_distillation distillation;
  lossd_batch batch;
  lossd_outputs outputs;
  lossd_result result;
  float divergences[kTokens];
  int i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  student = MakeHead(client, "student", &problem, kWithBias);
  teacher = MakeHead(client, "teacher", &problem, kWithBias);
  session = OpenSession(student);
  lossd_distillation_init(&distillation, sizeof distillation);
  distillation.teacher = "teacher";
  distillation.hidden_size = kHidden;
  distillation.hidden_states = problem.hidden;
  distillation.divergence = LOSSD_JENSEN_SHANNON;
  batch = BatchOf(&problem);
  batch.distillation = &distillation;
  lossd_outputs_init(&outputs, sizeof outputs);
  lossd_result_init(&result, sizeof result);
  outputs.divergences = divergences;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.divergence_sum, 0); /* they are the same */
  CHECK(result.teacher_weight_version == 1);
  distillation.temperature = 2;
  distillation.label_weight = 1;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss, problem.loss);
  for (i = 0; i < kTokens; ++i) NEAR(divergences[i], 0);
  distillation.divergence = 3;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT,
        "batch.distillation.divergence is 3");
  distillation.divergence = LOSSD_FORWARD_KL;
  distillation.teacher = NULL;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT,
        "batch.distillation.teacher is NULL");
  distillation.teacher = "teacher";
  distillation.hidden_states = NULL;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT,
        "batch.distillation.hidden_states is NULL");
  OK(lossd_client_delete_head(client, "student", 1));
  OK(lossd_client_delete_head(client, "teacher", 1));
  lossd_session_free(session);
  lossd_head_free(student);
  lossd_head_free(teacher);
  lossd_client_free(client);
}

void TestTargetLists(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_target_lists lists;
  lossd_batch batch;
  lossd_outputs outputs;
  lossd_result result;
  float divergences[kTokens];
  float losses[kTokens];
  float certain[kTokens];
  int64_t offsets[kTokens + 1];
  int32_t tokens[kTokens];
  int i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "lists", &problem, kWithBias);
  session = OpenSession(head);
  /* A target that is all of the label's is the cross-entropy. */
  for (i = 0; i < kTokens; ++i) {
    offsets[i] = i;
    tokens[i] = i == kIgnored ? 0 : (int32_t)problem.labels[i];
    certain[i] = 1;
  }
  offsets[kTokens] = kTokens;
  lossd_target_lists_init(&lists, sizeof lists);
  CHECK(lists.weight == 1 && lists.label_weight == 0);
  lists.offsets = offsets;
  lists.tokens = tokens;
  lists.probabilities = certain;
  lists.token_count = kTokens;
  batch = BatchOf(&problem);
  batch.target_lists = &lists;
  lossd_outputs_init(&outputs, sizeof outputs);
  lossd_result_init(&result, sizeof result);
  outputs.losses = losses;
  outputs.divergences = divergences;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss, problem.loss);
  NEAR(result.divergence_sum, problem.loss);
  for (i = 0; i < kTokens; ++i) {
    NEAR(losses[i], problem.losses[i]);
    NEAR(divergences[i], problem.losses[i]);
  }
  lists.label_weight = 2;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss, 3 * problem.loss);
  lists.label_weight = -1;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT,
        "target_lists.label_weight is -1");
  lists.label_weight = 0;
  lists.token_count = kTokens - 1;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT, "must be equal");
  lists.token_count = -1;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT,
        "batch.target_lists.token_count is -1");
  lists.token_count = kTokens;
  lists.probabilities = NULL;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT,
        "batch.target_lists.probabilities is NULL");
  lists.probabilities = certain;
  lists.offsets = NULL;
  FAILS(lossd_session_compute(session, &batch, &outputs, &result), LOSSD_INVALID_ARGUMENT,
        "batch.target_lists.offsets is NULL");
  OK(lossd_client_delete_head(client, "lists", 1));
  lossd_session_free(session);
  lossd_head_free(head);
  lossd_client_free(client);
}

void TestLogits(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_logits logits;
  float values[kTokens * kVocab];
  float best[kTokens * 2];
  int32_t tokens[kTokens * 2];
  float lse[kTokens];
  uint64_t version = 0;
  int i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "logits", &problem, kWithBias);
  lossd_logits_init(&logits, sizeof logits);
  logits.rows = kTokens;
  logits.hidden_states = problem.hidden;
  logits.logits = values;
  OK(lossd_head_logits(head, &logits, &version));
  CHECK(version == 1);
  logits.logits = NULL;
  logits.top_k = 2;
  logits.top_tokens = tokens;
  logits.top_logits = best;
  logits.log_sum_exp = lse;
  OK(lossd_head_logits(head, &logits, NULL));
  for (i = 0; i < kTokens; ++i) {
    if (i == kIgnored) continue;
    NEAR(lse[i] - values[i * kVocab + problem.labels[i]], problem.losses[i]);
    NEAR(best[2 * i], values[i * kVocab + tokens[2 * i]]);
    CHECK(best[2 * i] >= best[2 * i + 1]);
  }
  logits.dtype = 9;
  FAILS(lossd_head_logits(head, &logits, NULL), LOSSD_INVALID_ARGUMENT, "logits.dtype is 9");
  FAILS(lossd_head_logits(head, NULL, NULL), LOSSD_INVALID_ARGUMENT, "logits is NULL");
  FAILS(lossd_head_logits(NULL, &logits, NULL), LOSSD_INVALID_ARGUMENT, "head is NULL");
  OK(lossd_client_delete_head(client, "logits", 0));
  lossd_head_free(head);
  lossd_client_free(client);
}

void TestResume(const char* target, int count, char** arguments) {
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_session* successor = NULL;
  lossd_session_options options;
  lossd_batch batch;
  lossd_result result;
  uint64_t sequences[2] = {1, 1};
  char* json = NULL;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "resume", &problem, kWithBias);
  lossd_session_options_init(&options, sizeof options);
  options.client_key = "resumed";
  options.lanes = 1;
  OK(lossd_head_open_session(head, &options, &session));
  Compute(session, &problem);
  OK(lossd_head_open_session(head, &options, &successor));
  CHECK(Holds(MarksOf(successor), "\"accepted\":1"));
  FAILS(lossd_session_resume_at(successor, sequences, 2), LOSSD_INVALID_ARGUMENT, "1 lanes");
  OK(lossd_session_resume_at(successor, sequences, 1));
  batch = BatchOf(&problem);
  lossd_result_init(&result, sizeof result);
  OK(lossd_session_compute(successor, &batch, NULL, &result));
  CHECK(result.repeated_chunks == 1);
  NEAR(result.loss, problem.loss);
  OK(lossd_head_info(head, &json));
  CHECK(Holds(json, "\"window_tokens\":8"));
  OK(lossd_client_delete_head(client, "resume", 1));
  lossd_session_free(session);
  lossd_session_free(successor);
  lossd_head_free(head);
  lossd_client_free(client);
}
