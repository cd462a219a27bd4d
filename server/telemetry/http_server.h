// A small HTTP server for pages that are made when they are asked for: GET and HEAD, nothing of the disk, no
// state.
#ifndef LOSSD_SERVER_TELEMETRY_HTTP_SERVER_H_
#define LOSSD_SERVER_TELEMETRY_HTTP_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

struct mg_connection;
struct mg_context;

namespace lossd::telemetry {

struct HttpPage {
  std::string content_type;
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};  // beyond those that every answer has
};

class HttpServer {
 public:
  // Pages by path. Called by several threads at once; one that throws is answered with 500.
  using Pages = std::map<std::string, std::function<HttpPage()>, std::less<>>;

  // So many requests are answered at once: a client that is slow to ask or to read holds one of them, for
  // kTimeoutMs at most.
  static constexpr int kThreads = 16;
  static constexpr int kTimeoutMs = 2000;
  static constexpr int kMostRequestBytes = 8192;  // request line and headers

  // `listen` is host:port; port 0 takes a free one. UNAVAILABLE if the address cannot be used.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& listen, Pages pages);
  // Waits for requests under way.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const { return port_; }

 private:
  explicit HttpServer(Pages pages) : pages_(std::move(pages)) {}
  static int Answer(mg_connection* connection);
  static int AnswerPage(mg_connection* connection);

  const Pages pages_;
  mg_context* context_ = nullptr;
  std::string host_;
  int port_ = 0;
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_HTTP_SERVER_H_
