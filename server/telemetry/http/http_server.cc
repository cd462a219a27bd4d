#include "server/telemetry/http/http_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <list>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/engine/common/file_descriptor.h"
#include "server/telemetry/common/logging.h"
#include "server/telemetry/http/http_request.h"

namespace lossd::telemetry {
namespace {

using Clock = std::chrono::steady_clock;
using engine::FileDescriptor;

// How long a client may take to hang up after its answer.
constexpr std::chrono::milliseconds kHangUp(1000);
// How long new connections wait when there is no descriptor for them: there is no event for a free one.
constexpr std::chrono::milliseconds kPause(50);
// So many new connections at once at most: those that are there have a turn.
constexpr int kMostAtOnce = 16;
constexpr std::chrono::seconds kBetweenLines(10);

enum class Body { kSent, kLeftOut };  // left out: of HEAD

std::string_view ReasonOf(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 421:
      return "Misdirected Request";
    case 431:
      return "Request Header Fields Too Large";
    default:
      return "Internal Server Error";
  }
}

std::string Render(int code, const HttpPage& page, Body body) {
  std::string text =
      absl::StrCat("HTTP/1.1 ", code, " ", absl::string_view(ReasonOf(code).data(), ReasonOf(code).size()),
                   "\r\nContent-Type: ", page.content_type, "\r\nContent-Length: ", page.body.size(),
                   "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n");
  for (const auto& [name, value] : page.headers) absl::StrAppend(&text, name, ": ", value, "\r\n");
  absl::StrAppend(&text, "Connection: close\r\n\r\n");
  if (body == Body::kSent) text += page.body;
  return text;
}

std::string RenderText(int code, const std::string& text) {
  return Render(code, {"text/plain; charset=utf-8", text}, Body::kSent);
}

// Where the few descriptors begin that are kept for checkpoints and certificates. The system gives the lowest
// number that is free.
int64_t FirstForOthers() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return INT64_MAX;
  const auto limit = static_cast<int64_t>(files.rlim_cur);
  return limit - std::clamp<int64_t>(limit / 32, 4, 32);
}

}  // namespace

// One client, with one request.
class HttpServer::Connection {
 public:
  Connection(FileDescriptor socket, Clock::time_point now)
      : socket_(std::move(socket)),
        end_(now + std::chrono::milliseconds(kTotalMs)),
        due_(now + std::chrono::milliseconds(kRequestMs)) {}

  pollfd ToPoll() const {
    return {socket_.number(), static_cast<int16_t>(state_ == State::kWriting ? POLLOUT : POLLIN), 0};
  }
  Clock::time_point due() const { return due_; }

  // Does what can be done without waiting. `answer` makes an answer of the head of a request; an empty head
  // is one that was too long. False: there is nothing more to be done.
  template <typename Answer>
  bool GoOn(Clock::time_point now, const Answer& answer) {
    if (state_ == State::kReading && !Read()) return false;
    if (state_ == State::kReading) {
      const size_t end = EndOfHead(request_);
      const bool too_long =
          end == std::string::npos ? request_.size() > kMostRequestBytes : end > kMostRequestBytes;
      if (end == std::string::npos && !too_long) return true;
      answer_ = answer(too_long ? std::string_view() : std::string_view(request_).substr(0, end));
      state_ = State::kWriting;
      due_ = end_;
    }
    if (state_ == State::kWriting && !Write(now)) return false;
    return state_ != State::kHangingUp || Drop();
  }

 private:
  // Hanging up: until the client has, too. To close sooner might cost it the end of the answer.
  enum class State { kReading, kWriting, kHangingUp };

  // False: the client is gone.
  bool Read() {
    std::array<char, 4096> bytes{};
    while (request_.size() <= kMostRequestBytes) {
      const ssize_t got = recv(socket_.number(), bytes.data(), bytes.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno == EAGAIN;
      if (got == 0) return false;
      request_.append(bytes.data(), static_cast<size_t>(got));
      if (EndOfHead(request_) != std::string::npos) return true;
    }
    return true;
  }

  // False: the client is gone.
  bool Write(Clock::time_point now) {
    while (sent_ < answer_.size()) {
      const ssize_t sent =
          send(socket_.number(), answer_.data() + sent_, answer_.size() - sent_, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return errno == EAGAIN;
      sent_ += static_cast<size_t>(sent);
    }
    answer_ = {};
    shutdown(socket_.number(), SHUT_WR);
    state_ = State::kHangingUp;
    due_ = std::min(end_, now + kHangUp);
    return true;
  }

  // Reads and drops bytes beyond the request. False: the client has hung up.
  bool Drop() const {
    std::array<char, 4096> bytes{};
    const ssize_t got = recv(socket_.number(), bytes.data(), bytes.size(), 0);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
  }

  FileDescriptor socket_;
  State state_ = State::kReading;
  const Clock::time_point end_;
  Clock::time_point due_;  // when it is closed, whatever has become of it
  std::string request_;
  std::string answer_;
  size_t sent_ = 0;  // of the answer
};

class HttpServer::Loop {
 public:
  Loop(std::vector<int> listeners, HttpHosts hosts, Pages pages, FileDescriptor stop)
      : listeners_(std::move(listeners)),
        hosts_(std::move(hosts)),
        pages_(std::move(pages)),
        stop_(std::move(stop)) {
    polled_.reserve(1 + kMostConnections + listeners_.size());  // so that Wait() needs no memory
  }
  ~Loop() {
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    (void)!write(stop_.number(), &one, sizeof(one));
    thread_.join();
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void Start() {
    thread_ = std::thread([this] { Run(); });
  }

 private:
  void Run() {
    while (!Wait()) {
      try {
        const Clock::time_point now = Clock::now();
        GoOnWithAll(now);
        if (now >= listen_again_) TakeAll(now);
      } catch (const std::exception&) {  // there is no memory, not even to say so
        connections_.clear();
      }
    }
  }

  // Waits until something can be done. True: the server should end.
  bool Wait() {
    polled_.clear();
    polled_.push_back({stop_.number(), POLLIN, 0});
    Clock::time_point next = Clock::time_point::max();
    for (const Connection& connection : connections_) {
      polled_.push_back(connection.ToPoll());
      next = std::min(next, connection.due());
    }
    const bool listens = listen_again_ <= Clock::now();
    if (!listens) next = std::min(next, listen_again_);
    for (const int listener : listeners_) {
      if (listens) polled_.push_back({listener, POLLIN, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    const int64_t timeout = next == Clock::time_point::max() ? -1 : std::max<int64_t>(left, 0);
    poll(polled_.data(), polled_.size(), static_cast<int>(timeout));
    return polled_[0].revents != 0;
  }

  void GoOnWithAll(Clock::time_point now) {
    size_t place = 1;  // in polled_, in the order of connections_
    for (auto one = connections_.begin(); one != connections_.end();) {
      const bool can_go_on = polled_[place++].revents != 0;
      const bool stays = !can_go_on || one->GoOn(now, [this](std::string_view head) { return Answer(head); });
      one = stays && now < one->due() ? std::next(one) : connections_.erase(one);
    }
  }

  void TakeAll(Clock::time_point now) {
    for (const int listener : listeners_) {
      for (int i = 0; i < kMostAtOnce && Take(listener, now); ++i) {
      }
    }
  }

  // False: none waits, or there is no descriptor for it.
  bool Take(int listener, Clock::time_point now) {
    FileDescriptor socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.number() < 0) {
      const bool shortage = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (!shortage) return errno != EAGAIN && errno != EBADF;  // that connection was given up
      if (connections_.empty()) listen_again_ = now + kPause;
      DropOldest();
      return false;
    }
    if (socket.number() >= FirstForOthers()) return true;  // and is closed
    if (connections_.size() >= kMostConnections) DropOldest();
    connections_.emplace_back(std::move(socket), now);
    return true;
  }

  void DropOldest() {
    if (connections_.empty()) return;
    connections_.pop_front();
    LogNowAndThen(LogLevel::kWarning, "the metrics port closed its oldest connection for a new one",
                  "too many connections, or too few file descriptors");
  }

  std::string Answer(std::string_view head) {
    if (head.empty()) return RenderText(431, "the request is too long\n");
    const std::optional<HttpRequest> request = ParseRequest(head);
    if (!request.has_value()) return RenderText(400, "this is no request of HTTP/1.0 or HTTP/1.1\n");
    const Body body = request->method == "HEAD" ? Body::kLeftOut : Body::kSent;
    if (request->host.has_value() && !hosts_.Include(*request->host)) {
      LogNowAndThen(LogLevel::kWarning, "a request to the metrics port by a name that is not the server's",
                    absl::StrCat("Host: ", request->host->substr(0, 256), " (--metrics_hosts)"));
      return RenderText(421,
                        "this server is not asked by that name; give the name to lossd --metrics_hosts\n");
    }
    if (request->method != "GET" && request->method != "HEAD") {
      HttpPage refusal{"text/plain; charset=utf-8", "only GET and HEAD are answered\n"};
      refusal.headers = {{"Allow", "GET, HEAD"}};
      return Render(405, refusal, body);
    }
    const auto page = pages_.find(request->path);
    if (page != pages_.end()) return MakePage(page->second, body);
    std::string known = "there is no such page; there are:\n";
    for (const auto& [name, make] : pages_) absl::StrAppend(&known, name, "\n");
    return Render(404, {"text/plain; charset=utf-8", known}, body);
  }

  static std::string MakePage(const std::function<HttpPage()>& make, Body body) {
    try {
      try {
        return Render(200, make(), body);
      } catch (const std::exception& error) {
        Log(LogLevel::kError, "page could not be made", {{"reason", error.what()}});
      }
    } catch (...) {
      // Not a std::exception, or no memory to log it: only the answer says that the page failed.
    }
    return "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nCache-Control: no-store\r\n"
           "Connection: close\r\n\r\n";
  }

  // Strangers may bring it about as often as they like.
  void LogNowAndThen(LogLevel level, const char* event, const std::string& reason) {
    const Clock::time_point now = Clock::now();
    if (now < next_line_) return;
    next_line_ = now + kBetweenLines;
    Log(level, event, {{"reason", reason}});
  }

  const std::vector<int> listeners_;
  const HttpHosts hosts_;
  const Pages pages_;
  const FileDescriptor stop_;
  // The thread's own.
  std::list<Connection> connections_;  // the oldest first
  std::vector<pollfd> polled_;
  Clock::time_point listen_again_ = Clock::time_point::min();
  Clock::time_point next_line_ = Clock::time_point::min();
  std::thread thread_;
};

HttpServer::HttpServer(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
HttpServer::~HttpServer() = default;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(std::vector<int> listeners, HttpHosts hosts,
                                                              Pages pages) {
  FileDescriptor stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (stop.number() < 0) return absl::UnavailableError("no file descriptor is left for the metrics port");
  std::unique_ptr<HttpServer> server(new HttpServer(
      std::make_unique<Loop>(std::move(listeners), std::move(hosts), std::move(pages), std::move(stop))));
  try {
    server->loop_->Start();
  } catch (const std::system_error& error) {
    return absl::UnavailableError(absl::StrCat("no thread for the metrics port: ", error.what()));
  }
  return server;
}

}  // namespace lossd::telemetry
