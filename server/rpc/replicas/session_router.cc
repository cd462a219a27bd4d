#include "server/rpc/replicas/session_router.h"

#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/errors.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/replicas/session_places.h"

namespace lossd::rpc {
namespace {

using group::v1::ReplicaCommand;

SessionLoad LoadOf(const absl::StatusOr<std::string>& answer) {
  group::v1::SessionLoad load;
  if (answer.ok()) (void)load.ParseFromString(*answer);
  return {.has_session = load.has_session(), .lanes = load.lanes()};
}

}  // namespace

void SessionRouter::Serve(engine::Engine* engine, SessionCalls calls) {
  const engine::MutexLock lock(mutex_);
  served_ = std::make_shared<const Served>(Served{engine, std::move(calls)});
}

void SessionRouter::StopServing() {
  std::shared_ptr<const Served> served;
  {
    const engine::MutexLock lock(mutex_);
    served = std::exchange(served_, nullptr);
  }
  // Whoever uses it still does so within a call, which does not wait for this thread.
  while (served.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

absl::StatusOr<std::shared_ptr<const SessionRouter::Served>> SessionRouter::served() const {
  const engine::MutexLock lock(mutex_);
  if (served_ != nullptr) return served_;
  return absl::UnavailableError("the replica does not serve now; try again");
}

grpc::Status SessionRouter::ToGrpcStatus(const absl::Status& status) const {
  const auto here = served();
  if (here.ok()) return ToGrpc(status, (*here)->engine->counters());
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

// At the replica that is asked

template <class Request, class Response>
void SessionRouter::Pass(const grpc::CallbackServerContext& context, const char* path, const Request& request,
                         std::function<void(const grpc::Status&, Response)> done) {
  struct Call {
    explicit Call(const CoordinatorCalls& coordinator)
        : place(coordinator.place), stub(coordinator.channel) {}
    const std::shared_ptr<const void> place;
    grpc::ClientContext context;
    grpc::TemplatedGenericStub<Request, Response> stub;
    Request request;
    Response response;
  };
  const absl::StatusOr<CoordinatorCalls> coordinator = set_.coordinator();
  if (!coordinator.ok()) return done(ToGrpcStatus(coordinator.status()), {});
  const auto call = std::make_shared<Call>(*coordinator);
  call->request = request;
  call->context.set_deadline(context.deadline());
  PreparePassed(*coordinator, path, context, &call->context);
  call->stub.UnaryCall(
      &call->context, kPassPath, {}, &call->request, &call->response,
      [call, epoch = coordinator->epoch, done = std::move(done)](const grpc::Status& status) {
        done(epoch->Told(status), std::move(call->response));
      });
  coordinator->epoch->Add({call, &call->context});
}

void SessionRouter::OpenSession(const grpc::CallbackServerContext& context,
                                const v1::OpenSessionRequest& request, Opened done) {
  if (!place_.coordinates()) {
    return Pass<v1::OpenSessionRequest, v1::OpenSessionResponse>(context, kOpenSessionPath, request,
                                                                 std::move(done));
  }
  const absl::Status taken = placing_.TryRun([this, request, done] {
    absl::StatusOr<v1::OpenSessionResponse> opened = Place(request);
    if (opened.ok()) return done(grpc::Status::OK, *std::move(opened));
    done(ToGrpcStatus(opened.status()), {});
  });
  if (!taken.ok()) done(ToGrpcStatus(taken), {});
}

void SessionRouter::CloseSession(const grpc::CallbackServerContext& context,
                                 const v1::CloseSessionRequest& request, Closed done) {
  const int32_t at = engine::ReplicaOf(request.session_id(), place_.replicas);
  if (at == place_.replica) {
    const auto here = served();
    return done(ToGrpcStatus(here.ok() ? (*here)->calls.close(request) : here.status()));
  }
  if (!place_.coordinates()) {
    return Pass<v1::CloseSessionRequest, v1::CloseSessionResponse>(
        context, kCloseSessionPath, request,
        [done = std::move(done)](const grpc::Status& status, const v1::CloseSessionResponse&) {
          done(status);
        });
  }
  const absl::Status taken =
      placing_.TryRun([this, at, request, done] { done(ToGrpcStatus(CloseAt(at, request))); });
  if (!taken.ok()) done(ToGrpcStatus(taken));
}

// At the coordinator

absl::StatusOr<v1::OpenSessionResponse> SessionRouter::Place(const v1::OpenSessionRequest& request) {
  const auto here = served();
  if (!here.ok()) return here.status();
  const absl::StatusOr<OtherReplicas> others = set_.others();
  if (!others.ok()) return others.status();
  ReplicaCommand find;
  find.mutable_find_session()->set_head(request.head());
  find.mutable_find_session()->set_client_key(request.client_key());
  const OtherReplicas::Answers answers = others->AskEach("FindSession", find);
  if (absl::Status found = FirstError(answers); !found.ok()) return found;
  std::vector<SessionLoad> loads = {LoadOf(*(*here)->engine, request.head(), request.client_key())};
  for (const auto& answer : answers) loads.push_back(LoadOf(answer));
  const std::optional<int32_t> rank = request.deterministic() ? std::optional(request.rank()) : std::nullopt;
  const int32_t place = ChoosePlace(loads, rank);
  v1::OpenSessionResponse response;
  if (place == place_.replica) {
    absl::Status opened = (*here)->calls.open(request, &response);
    if (!opened.ok()) return opened;
    (*here)->engine->replicas().NotePlaced(place);
    return response;
  }
  ReplicaCommand open;
  *open.mutable_open_session() = request;
  const absl::StatusOr<std::string> opened = others->AskOne(place, "OpenSession", open);
  if (!opened.ok()) return opened.status();
  if (!response.ParseFromString(*opened)) return absl::InternalError("an answer cannot be read");
  (*here)->engine->replicas().NotePlaced(place);
  return response;
}

absl::Status SessionRouter::CloseAt(int32_t replica, const v1::CloseSessionRequest& request) {
  const absl::StatusOr<OtherReplicas> others = set_.others();
  if (!others.ok()) return others.status();
  ReplicaCommand close;
  *close.mutable_close_session() = request;
  return others->AskOne(replica, "CloseSession", close).status();
}

absl::Status SessionRouter::AddOthers(v1::Head* head) {
  const absl::StatusOr<OtherReplicas> others = set_.others();
  if (!others.ok()) return others.status();
  ReplicaCommand describe;
  describe.mutable_describe()->set_name(head->config().name());
  const OtherReplicas::Answers answers = others->AskEach("DescribeHead", describe);
  if (absl::Status told = FirstError(answers); !told.ok()) return told;
  for (const auto& answer : answers) {
    v1::Head part;
    if (!part.ParseFromString(*answer)) return absl::InternalError("an answer cannot be read");
    if (part.generation() != head->generation()) {
      return absl::AbortedError(
          absl::StrCat("a window of head ", head->config().name(), " is ending; ask again"));
    }
    head->set_window_tokens(head->window_tokens() + part.window_tokens());
    head->set_open_sessions(head->open_sessions() + part.open_sessions());
    head->mutable_sessions()->MergeFrom(part.sessions());
  }
  return absl::OkStatus();
}

// At the replica where it is

bool SessionRouter::Takes(const ReplicaCommand& command) {
  return command.has_find_session() || command.has_open_session() || command.has_close_session() ||
         command.has_describe();
}

absl::StatusOr<std::string> SessionRouter::Do(const ReplicaCommand& command) {
  const auto here = served();
  if (!here.ok()) return here.status();
  if (command.has_find_session()) {
    const group::v1::FindSession& find = command.find_session();
    const SessionLoad load = rpc::LoadOf(*(*here)->engine, find.head(), find.client_key());
    group::v1::SessionLoad told;
    told.set_has_session(load.has_session);
    told.set_lanes(load.lanes);
    return told.SerializeAsString();
  }
  if (command.has_describe()) {
    const auto head = (*here)->engine->FindHead(command.describe().name());
    if (!head.ok()) return head.status();
    v1::Head described;
    ToProto((*head)->Info(), &described);
    return described.SerializeAsString();
  }
  if (command.has_close_session()) {
    if (absl::Status closed = (*here)->calls.close(command.close_session()); !closed.ok()) return closed;
    return std::string();
  }
  v1::OpenSessionResponse response;
  absl::Status opened = (*here)->calls.open(command.open_session(), &response);
  if (!opened.ok()) return opened;
  return response.SerializeAsString();
}

}  // namespace lossd::rpc
