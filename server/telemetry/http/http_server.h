// A small HTTP server for pages that are made when they are asked for: GET and HEAD, nothing of the disk, no
// state.
//
// One thread waits for all connections at once, and makes one page at a time: a client that is slow to ask or
// to read holds a connection and nothing else. There are few of those, each has to be done in time, and where
// one more comes the oldest makes room.
#ifndef LOSSD_SERVER_TELEMETRY_HTTP_HTTP_SERVER_H_
#define LOSSD_SERVER_TELEMETRY_HTTP_HTTP_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/telemetry/http/http_hosts.h"

namespace lossd::telemetry {

struct HttpPage {
  std::string content_type;
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};  // beyond those that every answer has
};

class HttpServer {
 public:
  // Pages by path. Called by one thread, the server's; one that throws is answered with 500.
  using Pages = std::map<std::string, std::function<HttpPage()>, std::less<>>;

  static constexpr int kMostConnections = 64;
  static constexpr int kRequestMs = 2000;         // within which a request has come
  static constexpr int kTotalMs = 10'000;         // within which its answer has been taken, too
  static constexpr int kMostRequestBytes = 8192;  // request line and headers

  // Connections come from `listeners`: non-blocking sockets that listen, which outlive it. Requests by names
  // that `hosts` does not include are answered with 421. UNAVAILABLE without a file descriptor or a thread.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(std::vector<int> listeners, HttpHosts hosts,
                                                           Pages pages);
  // A page that is being made is finished; connections are closed.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  class Connection;
  class Loop;

  explicit HttpServer(std::unique_ptr<Loop> loop);

  const std::unique_ptr<Loop> loop_;
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_HTTP_HTTP_SERVER_H_
