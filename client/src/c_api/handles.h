// What the opaque pointers of lossd/c_api.h point to.
#ifndef LOSSD_CLIENT_SRC_C_API_HANDLES_H_
#define LOSSD_CLIENT_SRC_C_API_HANDLES_H_

#include <memory>
#include <string>

#include "lossd/c_api.h"
#include "lossd/client.h"

// The client library's handles hold what they need of each other themselves.
struct lossd_client {
  std::unique_ptr<lossd::Client> client;
};
struct lossd_head {
  lossd::Head head;
};
struct lossd_session {
  lossd::Session session;
};
struct lossd_weight_write {
  lossd::WeightWrite write;
};
struct lossd_region {
  lossd::Region region;
};

#endif  // LOSSD_CLIENT_SRC_C_API_HANDLES_H_
