#include "client/tools/perf/metrics.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace lossd::perf {
namespace {

constexpr time_t kTimeoutSeconds = 5;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// -1 if no address of the host answers; errno says why.
int Connect(const addrinfo* addresses) {
  const timeval timeout{kTimeoutSeconds, 0};
  for (const addrinfo* one = addresses; one != nullptr; one = one->ai_next) {
    const int fd = socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
    if (fd < 0) continue;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
    if (connect(fd, one->ai_addr, one->ai_addrlen) == 0) return fd;
    const int error = errno;
    close(fd);
    errno = error;
  }
  return -1;
}

absl::StatusOr<std::string> Get(const Socket& connection, const std::string& request) {
  if (send(connection.fd(), request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    return absl::ErrnoToStatus(errno, "cannot send the request");
  }
  std::string answer;
  std::array<char, 1 << 14> buffer{};
  for (;;) {
    const ssize_t got = recv(connection.fd(), buffer.data(), buffer.size(), 0);
    if (got == 0) return answer;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::ErrnoToStatus(errno, "cannot read the answer");
    answer.append(buffer.data(), static_cast<size_t>(got));
  }
}

}  // namespace

Metrics ParseMetrics(absl::string_view text) {
  Metrics metrics;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipWhitespace())) {
    if (absl::StartsWith(line, "#")) continue;
    const size_t space = line.rfind(' ');
    double value = 0;
    if (space == absl::string_view::npos || !absl::SimpleAtod(line.substr(space + 1), &value)) continue;
    metrics[std::string(line.substr(0, space))] = value;
  }
  return metrics;
}

absl::StatusOr<Metrics> ReadMetrics(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' is not HOST:PORT"));
  }
  std::string host = address.substr(0, colon);
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(absl::StrCat(address, ": ", gai_strerror(error)));
  const Socket connection(Connect(found));
  const int reason = errno;
  freeaddrinfo(found);
  if (connection.fd() < 0) {
    return absl::ErrnoToStatus(reason, absl::StrCat("cannot connect to ", address));
  }
  // HTTP/1.0: the answer comes in one piece and ends with the connection.
  const auto answer = Get(connection, "GET /metrics HTTP/1.0\r\n\r\n");
  if (!answer.ok()) return answer.status();
  const size_t head = answer->find("\r\n\r\n");
  const std::string first = answer->substr(0, answer->find("\r\n"));
  if (head == std::string::npos || !absl::StrContains(first, " 200 ")) {
    return absl::UnavailableError(absl::StrCat(address, " answered '", first, "'"));
  }
  return ParseMetrics(answer->substr(head + 4));
}

Histogram HistogramOf(const Metrics& metrics, const std::string& name, const std::string& label) {
  Histogram histogram;
  const std::string labels = label.empty() ? "" : absl::StrCat("{", label, "}");
  if (const auto sum = metrics.find(absl::StrCat(name, "_sum", labels)); sum != metrics.end()) {
    histogram.sum = sum->second;
  }
  if (const auto count = metrics.find(absl::StrCat(name, "_count", labels)); count != metrics.end()) {
    histogram.count = count->second;
  }
  const std::string prefix =
      absl::StrCat(name, "_bucket{", label.empty() ? "" : absl::StrCat(label, ","), "le=\"");
  for (auto at = metrics.lower_bound(prefix); at != metrics.end() && absl::StartsWith(at->first, prefix);
       ++at) {
    double bound = 0;
    absl::string_view rest = at->first;
    if (!absl::ConsumePrefix(&rest, prefix) || !absl::ConsumeSuffix(&rest, "\"}")) continue;
    if (absl::SimpleAtod(rest, &bound)) histogram.buckets.push_back({bound, at->second});
  }
  std::sort(histogram.buckets.begin(), histogram.buckets.end(),
            [](const Histogram::Bucket& a, const Histogram::Bucket& b) { return a.bound < b.bound; });
  return histogram;
}

}  // namespace lossd::perf
