#include "kernels/collectives/gloo_communicator.h"

#include <arpa/inet.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

namespace lossd::kernels::collectives {

const void* PeerNamesOfGloo();  // gloo_peer_name.cc

namespace {

using Clock = std::chrono::steady_clock;
using Buffer = gloo::transport::UnboundBuffer;

// While it lives, the thread does not get `signals`; of those, SIGPIPE does not come later either: Gloo
// writes to sockets that the other end may have closed.
class BlockedSignals {
 public:
  explicit BlockedSignals(const sigset_t& signals) {
    sigset_t pending;
    was_pending_ = sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~BlockedSignals() {
    if (!was_pending_ && sigismember(&before_, SIGPIPE) == 0) {
      const sigset_t pipe = Pipe();
      const timespec at_once = {};
      while (sigtimedwait(&pipe, nullptr, &at_once) == SIGPIPE) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  static sigset_t Pipe() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGPIPE);
    return signals;
  }
  static sigset_t All() {
    sigset_t signals;
    sigfillset(&signals);
    return signals;
  }

 private:
  sigset_t before_;
  bool was_pending_;
};

// Gloo's messages begin with the place in its source: "[/build/gloo/pair.cc:598] Connection closed ...".
std::string Cause(const std::exception& exception) {
  const std::string text = exception.what();
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

// Goes behind the data of every exchange, on the same connection. It says what the data was, so that ranks
// that are not in the same call find out before they wait for each other.
struct Trailer {
  uint64_t token = 0;  // what the receiver gave this rank through the rendezvous
  int64_t bytes = 0;
  uint32_t operation = 0;
  uint32_t zero = 0;  // Gloo sends what lies in memory: there is no padding
};
// Says that the data of an exchange has arrived.
constexpr uint8_t kArrived = 1;

enum class Kind : uint64_t { kData, kTrailer, kAnswer, kWatch };

// What Gloo knows a message by. Data of another size has another slot: Gloo would end the process over data
// that is larger than what waits for it.
uint64_t Slot(Kind kind, uint64_t exchange, int64_t bytes) {
  const auto size = static_cast<uint64_t>(bytes);
  return (exchange << 34) | (((size ^ (size >> 32)) & 0xffffffff) << 2) | static_cast<uint64_t>(kind);
}

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(const GlooOptions& options)
      : Communicator(options.rank, options.size),
        timeout_(options.timeout),
        peers_(static_cast<size_t>(options.size)),
        trailers_(peers_.size()),
        answers_(peers_.size()) {}

  ~GlooCommunicator() override {
    const BlockedSignals pipe(BlockedSignals::Pipe());
    peers_.clear();
    trailers_buffer_ = nullptr;
    answers_buffer_ = nullptr;
    context_ = nullptr;
    device_ = nullptr;
  }

  // Nothing else is called before it has succeeded.
  Result Connect(const GlooOptions& options, Rendezvous& rendezvous);

 private:
  struct Peer {
    uint64_t token = 0;  // what it expects of this rank
    // Outlives the exchange: nobody waits for the answer to be gone, and Gloo may still have it to send.
    std::unique_ptr<Buffer> answer;
  };

  // What an exchange has under way with one peer.
  struct UnderWay {
    int peer = 0;
    Trailer trailer;
    std::unique_ptr<Buffer> send, send_trailer, receive;
  };

  Result Carry(Operation operation, std::span<const Transfer> transfers, void* stream) override;
  Result GatherOnHost(Operation operation, const void* own, int64_t bytes, void* all, void* stream) override;
  Result Sum(const RankOrderSum& sum, void* stream) override;
  Result Synchronize(void* stream) override;
  Result CheckStream(void* stream) const override;
  void Close() override;

  Result CarryUntil(Operation operation, std::span<const Transfer> transfers, Clock::time_point deadline);
  Result TryConnect(const GlooOptions& options, Rendezvous& rendezvous);
  // Throws what Gloo throws.
  Result TryExchange(Operation operation, std::span<const Transfer> transfers, Clock::time_point deadline);
  void Post(const Transfer& transfer, UnderWay* with);
  Result CheckTrailer(Operation operation, int64_t bytes, int peer) const;
  // What an exception means, whose message is `cause`.
  Result Explain(const std::string& cause, Clock::time_point deadline);
  std::vector<int> LostPeers();
  // Those whose trailer has not come; if all have, those whose answer has not.
  std::vector<int> MissingPeers() const;
  // Waits for one message from each peer. False: Abort() came.
  bool WaitForAll(Buffer& buffer, Clock::time_point deadline);
  std::unique_ptr<Buffer> Wrap(const void* memory, size_t bytes) {
    return context_->createUnboundBuffer(const_cast<void*>(memory), bytes);
  }

  const std::chrono::milliseconds timeout_;
  uint64_t token_ = 0;  // what the others have to show
  uint64_t exchanges_ = 0;
  // From the bottom up: pairs of the context refer to the device.
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<Peer> peers_;
  // What has come from each rank in the present exchange, and the two buffers of it.
  std::vector<Trailer> trailers_;
  std::vector<uint8_t> answers_;
  std::unique_ptr<Buffer> trailers_buffer_;
  std::unique_ptr<Buffer> answers_buffer_;

  std::mutex close_mutex_;
  bool closed_ = false;  // guarded by close_mutex_
};

// For people: "1", or "1, 2".
std::string ListOf(const std::vector<int>& ranks) {
  std::string list;
  for (const int rank : ranks) list.append(list.empty() ? "" : ", ").append(std::to_string(rank));
  return list;
}

std::chrono::milliseconds Left(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()),
                  std::chrono::milliseconds(1));
}

Result GlooCommunicator::Connect(const GlooOptions& options, Rendezvous& rendezvous) {
  const auto refused = [&](const Result& result) {
    return Result(result.code(), std::string(NameOf(Operation::kConnect)) + ": rank " +
                                     std::to_string(rank()) + " of " + std::to_string(size()) + ": " +
                                     result.message());
  };
  Result result;
  try {
    result = TryConnect(options, rendezvous);
  } catch (const std::exception& exception) {
    result = {Code::kFailed, Cause(exception)};
  }
  if (!result.ok()) return refused(result);
  // Whoever has connected has to show the token before anything else is said.
  const std::vector<Transfer> nothing(static_cast<size_t>(size()));
  result = CarryUntil(Operation::kConnect, nothing,
                      Clock::now() + std::min(options.timeout, options.connect_timeout));
  return result.ok() ? result : refused(result);
}

Result GlooCommunicator::TryConnect(const GlooOptions& options, Rendezvous& rendezvous) {
  gloo::transport::tcp::attr network;
  network.iface = options.interface;
  network.hostname = options.address;
  try {
    const BlockedSignals all(BlockedSignals::All());  // Gloo's thread inherits them
    device_ = gloo::transport::tcp::CreateDevice(network);
  } catch (const std::exception& exception) {
    return {Code::kUnavailable, "using the network " +
                                    (options.interface.empty() ? options.address : options.interface) + ": " +
                                    Cause(exception)};
  }
  const BlockedSignals pipe(BlockedSignals::Pipe());
  context_ = device_->createContext(rank(), size());
  const std::chrono::milliseconds timeout = std::min(options.timeout, options.connect_timeout);
  context_->setTimeout(timeout);
  if (getrandom(&token_, sizeof(token_), 0) != sizeof(token_)) return {Code::kFailed, "no random numbers"};
  token_ |= 1;  // 0 is no token

  // Each rank says: its token, and the address at which it waits for each rank, of which its own is empty.
  std::vector<std::vector<char>> addresses(peers_.size());
  size_t address_bytes = 0;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    std::vector<char>& address = addresses[static_cast<size_t>(peer)];
    address = context_->createPair(peer)->address().bytes();
    address_bytes = address.size();
  }
  addresses[static_cast<size_t>(rank())].resize(address_bytes);
  std::string own(reinterpret_cast<const char*>(&token_), sizeof(token_));
  for (const std::vector<char>& address : addresses) own.append(address.begin(), address.end());
  const size_t own_bytes = own.size();
  trailers_buffer_ = Wrap(trailers_.data(), trailers_.size() * sizeof(Trailer));
  answers_buffer_ = Wrap(answers_.data(), answers_.size());
  std::vector<std::string> all;
  LOSSD_COLLECTIVE_TRY(rendezvous.AllGather(std::move(own), timeout, &all));
  if (all.size() != peers_.size()) {
    return {Code::kMismatch, "the rendezvous has " + std::to_string(all.size()) + " ranks"};
  }
  const Clock::time_point deadline = Clock::now() + timeout;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const std::string& told = all[static_cast<size_t>(peer)];
    if (told.size() != own_bytes) {
      return {Code::kMismatch, "rank " + std::to_string(peer) + " has another kind of address"};
    }
    Peer& to = peers_[static_cast<size_t>(peer)];
    std::memcpy(&to.token, told.data(), sizeof(to.token));
    to.answer = Wrap(&kArrived, sizeof(kArrived));
    const auto first =
        told.begin() + static_cast<ptrdiff_t>(sizeof(to.token) + address_bytes * static_cast<size_t>(rank()));
    try {
      context_->getPair(peer)->connect(
          std::vector<char>(first, first + static_cast<ptrdiff_t>(address_bytes)));
    } catch (const std::exception& exception) {
      return {Clock::now() >= deadline ? Code::kTimeout : Code::kPeerLost,
              "connecting to rank " + std::to_string(peer) + ": " + Cause(exception)};
    }
    // This never comes. It lets Gloo tell who waits for trailers when this peer is lost, even if its own
    // trailer has come: as long as a trailer is missing no rank can have left the exchange in good order.
    trailers_buffer_->recv(peer, Slot(Kind::kWatch, 0, 0), 0, 0);
  }
  return {};
}

Result GlooCommunicator::Carry(Operation operation, std::span<const Transfer> transfers, void* /*stream*/) {
  return CarryUntil(operation, transfers, Clock::now() + timeout_);
}

Result GlooCommunicator::CarryUntil(Operation operation, std::span<const Transfer> transfers,
                                    Clock::time_point deadline) {
  const Transfer& self = transfers[static_cast<size_t>(rank())];
  if (self.send_bytes > 0 && self.send != self.receive) {
    std::memmove(self.receive, self.send, static_cast<size_t>(self.send_bytes));
  }
  if (size() == 1) return {};
  const BlockedSignals pipe(BlockedSignals::Pipe());
  try {
    return TryExchange(operation, transfers, deadline);
  } catch (const std::exception& exception) {
    return Explain(Cause(exception), deadline);
  }
}

Result GlooCommunicator::TryExchange(Operation operation, std::span<const Transfer> transfers,
                                     Clock::time_point deadline) {
  const Result aborted_here(Code::kAborted, "aborted");
  ++exchanges_;
  std::fill(trailers_.begin(), trailers_.end(), Trailer());
  std::fill(answers_.begin(), answers_.end(), uint8_t{0});
  std::vector<UnderWay> under_way(transfers.size() - 1);
  // Ranks begin with their neighbours, so that not all of them send to rank 0 first.
  for (int i = 0; i < size() - 1; ++i) {
    UnderWay& with = under_way[static_cast<size_t>(i)];
    with.peer = (rank() + 1 + i) % size();
    const Transfer& transfer = transfers[static_cast<size_t>(with.peer)];
    with.trailer = {.token = peers_[static_cast<size_t>(with.peer)].token,
                    .bytes = transfer.send_bytes,
                    .operation = static_cast<uint32_t>(operation)};
    Post(transfer, &with);
  }
  // Gloo tells of a lost connection those who wait for something that has not begun to come, not those whose
  // data is half here or half gone. So what is waited for is small and comes last: the trailers behind the
  // data, and answers that say that this rank's data is there.
  if (!WaitForAll(*trailers_buffer_, deadline)) return aborted_here;
  for (const UnderWay& with : under_way) {
    const int64_t bytes = transfers[static_cast<size_t>(with.peer)].receive_bytes;
    LOSSD_COLLECTIVE_TRY(CheckTrailer(operation, bytes, with.peer));
    if (with.receive != nullptr) with.receive->waitRecv(nullptr, Left(deadline));  // it is there
    peers_[static_cast<size_t>(with.peer)].answer->send(with.peer, Slot(Kind::kAnswer, exchanges_, 0), 0, 1);
  }
  if (!WaitForAll(*answers_buffer_, deadline)) return aborted_here;
  for (const UnderWay& with : under_way) {  // all of it is gone
    if (with.send != nullptr) with.send->waitSend(nullptr, Left(deadline));
    with.send_trailer->waitSend(nullptr, Left(deadline));
  }
  return {};
}

void GlooCommunicator::Post(const Transfer& transfer, UnderWay* with) {
  const uint64_t trailer = Slot(Kind::kTrailer, exchanges_, 0);
  const auto peer = static_cast<size_t>(with->peer);
  if (transfer.receive_bytes > 0) {
    with->receive = Wrap(transfer.receive, static_cast<size_t>(transfer.receive_bytes));
    with->receive->recv(with->peer, Slot(Kind::kData, exchanges_, transfer.receive_bytes), 0,
                        static_cast<size_t>(transfer.receive_bytes));
  }
  trailers_buffer_->recv(with->peer, trailer, peer * sizeof(Trailer), sizeof(Trailer));
  answers_buffer_->recv(with->peer, Slot(Kind::kAnswer, exchanges_, 0), peer, 1);
  if (transfer.send_bytes > 0) {
    with->send = Wrap(transfer.send, static_cast<size_t>(transfer.send_bytes));
    with->send->send(with->peer, Slot(Kind::kData, exchanges_, transfer.send_bytes), 0,
                     static_cast<size_t>(transfer.send_bytes));
  }
  with->send_trailer = Wrap(&with->trailer, sizeof(Trailer));
  with->send_trailer->send(with->peer, trailer, 0, sizeof(Trailer));
}

Result GlooCommunicator::CheckTrailer(Operation operation, int64_t bytes, int peer) const {
  const Trailer& got = trailers_[static_cast<size_t>(peer)];
  const std::string name = "rank " + std::to_string(peer);
  if (got.token != token_) return {Code::kMismatch, "a stranger has connected in place of " + name};
  if (got.operation != static_cast<uint32_t>(operation)) {
    return {Code::kMismatch, name + " is in another call: " + NameOf(static_cast<Operation>(got.operation))};
  }
  if (got.bytes != bytes) {
    return {Code::kMismatch, name + " sends " + std::to_string(got.bytes) + " bytes where " +
                                 std::to_string(bytes) + " are expected"};
  }
  return {};
}

bool GlooCommunicator::WaitForAll(Buffer& buffer, Clock::time_point deadline) {
  for (int message = 0; message < size() - 1; ++message) {
    if (!buffer.waitRecv(nullptr, Left(deadline)) || aborted()) return false;
  }
  return true;
}

Result GlooCommunicator::Explain(const std::string& cause, Clock::time_point deadline) {
  if (Clock::now() >= deadline) {
    // Gloo has closed all connections: nothing comes any more.
    return {Code::kTimeout, "nothing came from rank " + ListOf(MissingPeers()) + " within " +
                                std::to_string(timeout_.count()) + " ms"};
  }
  // Beside a rank that died there may be others already that gave up because of it.
  const std::vector<int> lost = LostPeers();
  if (lost.empty()) return {Code::kFailed, cause};
  return {Code::kPeerLost, "lost the connection to rank " + ListOf(lost) + ": " + cause};
}

std::vector<int> GlooCommunicator::LostPeers() {
  std::vector<int> lost;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    try {
      // Who comes here closes all connections next; so nobody minds that this never comes.
      Wrap(nullptr, 0)->recv(peer, Slot(Kind::kWatch, 0, 0), 0, 0);
    } catch (const std::exception&) {
      lost.push_back(peer);
    }
  }
  return lost;
}

std::vector<int> GlooCommunicator::MissingPeers() const {
  std::vector<int> without_trailer;
  std::vector<int> without_answer;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    if (trailers_[static_cast<size_t>(peer)].token == 0) without_trailer.push_back(peer);
    if (answers_[static_cast<size_t>(peer)] == 0) without_answer.push_back(peer);
  }
  return without_trailer.empty() ? without_answer : without_trailer;
}

Result GlooCommunicator::GatherOnHost(Operation operation, const void* own, int64_t bytes, void* all,
                                      void* stream) {
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < size(); ++peer) {
    transfers.push_back({own, bytes, static_cast<char*>(all) + peer * bytes, bytes});
  }
  return Carry(operation, transfers, stream);
}

Result GlooCommunicator::Sum(const RankOrderSum& sum, void* /*stream*/) {
  SumInRankOrder(sum);
  return {};
}

Result GlooCommunicator::Synchronize(void* /*stream*/) { return {}; }

Result GlooCommunicator::CheckStream(void* stream) const {
  if (stream == nullptr) return {};
  return {Code::kInvalidArgument, "Gloo has no streams; the stream must be null"};
}

void GlooCommunicator::Close() {
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (closed_ || size() == 1) return;
  closed_ = true;
  trailers_buffer_->abortWaitRecv();
  answers_buffer_->abortWaitRecv();
  const BlockedSignals pipe(BlockedSignals::Pipe());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    try {
      context_->getPair(peer)->close();
    } catch (const std::exception&) {
      // The connection is left to the end of the process.
    }
  }
}

bool IsAddress(const std::string& text) {
  in6_addr address;
  return inet_pton(AF_INET, text.c_str(), &address) == 1 || inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

}  // namespace

Result ConnectGloo(const GlooOptions& options, Rendezvous& rendezvous,
                   std::unique_ptr<Communicator>* communicator) {
  if (PeerNamesOfGloo() == nullptr) return {Code::kFailed, "getpeername is not what it should be"};
  const auto invalid = [](const std::string& why) {
    return Result(Code::kInvalidArgument, std::string(NameOf(Operation::kConnect)) + ": " + why);
  };
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return invalid("there is no rank " + std::to_string(options.rank) + " of " +
                   std::to_string(options.size));
  }
  if (options.timeout < std::chrono::milliseconds(1)) return invalid("the timeout must be at least 1 ms");
  if (options.interface.empty() && !IsAddress(options.address)) {
    return invalid("'" + options.address + "' is neither an IPv4 nor an IPv6 address");
  }
  try {
    auto connected = std::make_unique<GlooCommunicator>(options);
    if (options.size > 1) LOSSD_COLLECTIVE_TRY(connected->Connect(options, rendezvous));
    *communicator = std::move(connected);
  } catch (const std::exception& exception) {
    return {Code::kFailed, std::string(NameOf(Operation::kConnect)) + ": " + exception.what()};
  }
  return {};
}

}  // namespace lossd::kernels::collectives
