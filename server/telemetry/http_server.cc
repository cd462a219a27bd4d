#include "server/telemetry/http_server.h"

#include <civetweb.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <string_view>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/telemetry/logging.h"

namespace lossd::telemetry {
namespace {

enum class Body { kSent, kLeftOut };  // left out: of HEAD

int Send(mg_connection* connection, int status, const HttpPage& page, Body body) {
  std::string text =
      absl::StrCat("HTTP/1.1 ", status, " ", mg_get_response_code_text(connection, status),
                   "\r\nContent-Type: ", page.content_type, "\r\nContent-Length: ", page.body.size(),
                   "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n");
  for (const auto& [name, value] : page.headers) absl::StrAppend(&text, name, ": ", value, "\r\n");
  absl::StrAppend(&text, "Connection: close\r\n\r\n");
  if (body == Body::kSent) text += page.body;
  mg_write(connection, text.data(), text.size());
  return status;
}

// Without any memory of its own: there may be none.
int SendFailure(mg_connection* connection) {
  constexpr std::string_view kAnswer =
      "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nCache-Control: no-store\r\n"
      "Connection: close\r\n\r\n";
  mg_write(connection, kAnswer.data(), kAnswer.size());
  return 500;
}

HttpPage Plain(std::string text) { return {"text/plain; charset=utf-8", std::move(text)}; }

// What the library has to say of clients that behave badly.
int LogMessage(const mg_connection* /*connection*/, const char* message) {
  Log(LogLevel::kDebug, "metrics port", {{"reason", message}});
  return 1;  // it is dealt with
}

// Connects, and hangs up.
void Knock(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.empty() ? nullptr : host.c_str(), absl::StrCat(port).c_str(), &hints, &found) != 0) {
    return;
  }
  const int descriptor = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, 0);
  if (descriptor >= 0) {
    // Whether anybody still listens does not matter.
    (void)connect(descriptor, found->ai_addr, found->ai_addrlen);
    close(descriptor);
  }
  freeaddrinfo(found);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& listen, Pages pages) {
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(pages)));
  mg_callbacks callbacks{};
  callbacks.begin_request = &HttpServer::Answer;
  callbacks.log_message = &LogMessage;
  const std::string threads = absl::StrCat(kThreads);
  const std::string timeout = absl::StrCat(kTimeoutMs);
  const std::string most_bytes = absl::StrCat(kMostRequestBytes);
  // One request a connection: one that is kept open would keep a thread.
  const std::array<const char*, 13> options = {"listening_ports",
                                               listen.c_str(),
                                               "num_threads",
                                               threads.c_str(),
                                               "request_timeout_ms",
                                               timeout.c_str(),
                                               "max_request_size",
                                               most_bytes.c_str(),
                                               "enable_keep_alive",
                                               "no",
                                               "tcp_nodelay",
                                               "1",
                                               nullptr};
  server->context_ = mg_start(&callbacks, server.get(), const_cast<const char**>(options.data()));
  mg_server_port bound{};
  if (server->context_ == nullptr || mg_get_server_ports(server->context_, 1, &bound) < 1) {
    const bool lacks_ipv6 = listen.starts_with('[') && mg_check_feature(MG_FEATURES_IPV6) == 0;
    return engine::MakeError(
        absl::StatusCode::kUnavailable, engine::RejectReason::kInternal, "metrics_listen",
        absl::StrCat("cannot listen on ", listen, " for metrics; ",
                     lacks_ipv6 ? "this system's CivetWeb has no IPv6: name an address of IPv4"
                                : "is the port free?"));
  }
  server->port_ = bound.port;
  server->host_ = listen.substr(0, listen.rfind(':'));
  if (server->host_.starts_with('[')) server->host_ = server->host_.substr(1, server->host_.size() - 2);
  return server;
}

// The library's listening thread looks whether it should stop every 2 s, or when somebody connects.
HttpServer::~HttpServer() {
  if (context_ == nullptr) return;
  std::atomic<bool> stopped = false;
  std::thread knocking;
  try {
    knocking = std::thread([&] {
      while (!stopped) {
        Knock(host_, port_);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
  } catch (const std::system_error& error) {
    Log(LogLevel::kDebug, "metrics port closes slowly", {{"reason", error.what()}});
  }
  mg_stop(context_);
  stopped = true;
  if (knocking.joinable()) knocking.join();
}

// Of every request that could be read, before the library does anything about it: nothing is left to it.
// The library is C: no exception may get into it.
int HttpServer::Answer(mg_connection* connection) {
  try {
    try {
      return AnswerPage(connection);
    } catch (const std::exception& error) {
      Log(LogLevel::kError, "page could not be made", {{"reason", error.what()}});
    }
  } catch (...) {
    // Nothing that could be logged, or no memory to log it: the client is told, as below.
  }
  return SendFailure(connection);
}

int HttpServer::AnswerPage(mg_connection* connection) {
  const mg_request_info* request = mg_get_request_info(connection);
  const auto* server = static_cast<const HttpServer*>(request->user_data);
  const std::string_view method = request->request_method;
  const Body body = method == "HEAD" ? Body::kLeftOut : Body::kSent;
  if (method != "GET" && method != "HEAD") {
    HttpPage refusal = Plain("only GET and HEAD are answered\n");
    refusal.headers = {{"Allow", "GET, HEAD"}};
    return Send(connection, 405, refusal, body);
  }
  const char* const path = request->local_uri;
  const auto page = server->pages_.find(std::string_view(path == nullptr ? "" : path));
  if (page != server->pages_.end()) return Send(connection, 200, page->second(), body);
  std::string known = "there is no such page; there are:\n";
  for (const auto& [name, make] : server->pages_) absl::StrAppend(&known, name, "\n");
  return Send(connection, 404, Plain(std::move(known)), body);
}

}  // namespace lossd::telemetry
