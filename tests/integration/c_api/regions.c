/* Memory that is shared with the server. */
#include <string.h>

#include "tests/integration/c_api/check.h"

void TestRegions(const char* target, int count, char** arguments) {
  enum { kDxAt = 1024 };
  Problem problem;
  lossd_client* client = Connect(target);
  lossd_head* head = NULL;
  lossd_session* session = NULL;
  lossd_region* region = NULL;
  lossd_region* device = NULL;
  lossd_batch batch;
  lossd_outputs outputs;
  lossd_result result;
  float dx[kTokens * kHidden];
  char* data = NULL;
  int i = 0;
  (void)count, (void)arguments;
  MakeProblem(&problem);
  head = MakeHead(client, "regions", &problem, kWithBias);
  session = OpenSession(head);
  OK(lossd_client_create_region(client, LOSSD_REGION_SYSTEM, 2000, &region));
  CHECK(lossd_region_size(region) >= 2000);
  data = lossd_region_data(region);
  CHECK(data != NULL);
  OK(lossd_region_copy_in(region, 0, problem.hidden, sizeof problem.hidden));
  CHECK(memcmp(data, problem.hidden, sizeof problem.hidden) == 0);
  batch = BatchOf(&problem);
  batch.hidden_states = data;
  lossd_outputs_init(&outputs, sizeof outputs);
  lossd_result_init(&result, sizeof result);
  outputs.dx = data + kDxAt;
  OK(lossd_session_compute(session, &batch, &outputs, &result));
  NEAR(result.loss, problem.loss);
  OK(lossd_region_copy_out(region, kDxAt, dx, sizeof dx));
  for (i = 0; i < kTokens * kHidden; ++i) NEAR(dx[i], problem.dx[i]);
  FAILS(lossd_region_copy_out(region, 1 << 20, dx, sizeof dx), LOSSD_INVALID_ARGUMENT, "1048576");
  FAILS(lossd_region_copy_in(region, 0, NULL, 4), LOSSD_INVALID_ARGUMENT, "host is NULL");
  FAILS(lossd_region_copy_out(region, 0, NULL, 4), LOSSD_INVALID_ARGUMENT, "host is NULL");
  /* A server without a GPU has no such memory. */
  FAILS(lossd_client_create_region(client, LOSSD_REGION_DEVICE, 64, &device), LOSSD_FAILED_PRECONDITION, "");
  FAILS(lossd_client_create_region(client, LOSSD_REGION_SYSTEM, -1, &device), LOSSD_INVALID_ARGUMENT, "-1");
  OK(lossd_client_delete_head(client, "regions", 1));
  lossd_client_free(client);
  lossd_session_free(session);
  lossd_region_free(region);
  lossd_head_free(head);
}
