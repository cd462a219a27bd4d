#include "server/rpc/group/member_stream.h"

#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace lossd::rpc {

using group::v1::LeaderMessage;
using group::v1::MemberMessage;

namespace {

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace

grpc::Status MemberStream::Serve(const std::shared_ptr<GroupState>& state, const MemberMessage& first,
                                 grpc::ServerContext* context, Stream* stream) {
  if (!first.has_hello()) return {grpc::StatusCode::INVALID_ARGUMENT, "the first message must be hello"};
  const auto member = std::make_shared<MemberStream>(state, first.hello(), context);
  const absl::Status joined = state->Join(first.hello(), member);
  return joined.ok() ? member->Serve(stream) : ToGrpc(joined);
}

grpc::Status MemberStream::Serve(Stream* stream) {
  std::thread writer([this, stream] { WriteAll(stream); });
  MemberMessage incoming;
  absl::Status taken;
  do {
    taken = stream->Read(&incoming) ? state_->Take(rank_, incoming)
                                    : absl::CancelledError("its connection ended");
  } while (taken.ok());
  state_->Leave(rank_, std::string(taken.message()));
  CloseWith(ToGrpc(taken));
  writer.join();
  return closing();
}

// gRPC says "ipv4:192.0.2.1:4711", "ipv6:%5B2001:db8::1%5D:4711", and of Unix sockets nothing that helps.
std::string MemberStream::Peer() const {
  const std::string peer = context_->peer();
  for (const absl::string_view kind : {"ipv4:", "ipv6:"}) {
    if (absl::StartsWith(peer, kind)) {
      return absl::StrReplaceAll(peer.substr(kind.size()), {{"%5B", "["}, {"%5D", "]"}});
    }
  }
  return {};
}

void MemberStream::Write(std::shared_ptr<const LeaderMessage> message) {
  const engine::MutexLock lock(mutex_);
  if (closing_.has_value()) return;
  outgoing_.push_back(std::move(message));
  changed_.NotifyAll();
}

bool MemberStream::IsStuck() {
  const engine::MutexLock lock(mutex_);
  const bool waits = writing_ || !outgoing_.empty();
  return waits && !std::exchange(progress_, false);
}

void MemberStream::CloseWith(const grpc::Status& status) {
  const engine::MutexLock lock(mutex_);
  if (!closing_.has_value()) closing_ = status;
  changed_.NotifyAll();
}

grpc::Status MemberStream::closing() {
  const engine::MutexLock lock(mutex_);
  return closing_.value_or(grpc::Status::CANCELLED);
}

std::shared_ptr<const LeaderMessage> MemberStream::NextToWrite() {
  const engine::MutexLock lock(mutex_);
  if (std::exchange(writing_, false)) progress_ = true;
  while (outgoing_.empty() && !closing_.has_value()) changed_.Wait(mutex_);
  if (outgoing_.empty()) return nullptr;
  std::shared_ptr<const LeaderMessage> message = std::move(outgoing_.front());
  outgoing_.pop_front();
  writing_ = true;
  return message;
}

void MemberStream::WriteAll(Stream* stream) {
  while (const std::shared_ptr<const LeaderMessage> message = NextToWrite()) {
    if (stream->Write(*message)) continue;
    // The read that is under way fails too, and says to whom this happened.
    CloseWith(grpc::Status(grpc::StatusCode::CANCELLED, "the stream broke"));
    const engine::MutexLock lock(mutex_);
    outgoing_.clear();
  }
}

}  // namespace lossd::rpc
