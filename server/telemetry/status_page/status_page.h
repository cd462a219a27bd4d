// The status page: one document with all that it needs, which asks for itself again every two seconds.
#ifndef LOSSD_SERVER_TELEMETRY_STATUS_PAGE_STATUS_PAGE_H_
#define LOSSD_SERVER_TELEMETRY_STATUS_PAGE_STATUS_PAGE_H_

#include "server/telemetry/http/http_server.h"
#include "server/telemetry/status_page/server_status.h"

namespace lossd::telemetry {

// The page and the headers that keep everything out of it that is not its own.
HttpPage StatusPage(const ServerStatus& status);

// status_page_style.cc
extern const char kStatusStyle[];
extern const char kStatusScript[];

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_STATUS_PAGE_STATUS_PAGE_H_
