// lossctl health
#include <google/protobuf/wrappers.pb.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <chrono>
#include <memory>
#include <string>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/src/connection/channel_arguments.h"
#include "client/src/connection/diagnosis.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/replica_channels.h"
#include "client/src/connection/tls.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

// A health check is asked again soon by whoever asked.
constexpr double kHealthSeconds = 5;
constexpr char kMethod[] = "/grpc.health.v1.Health/Check";
constexpr int kServing = 1;

// On the wire a HealthCheckRequest is a string in field 1 and its answer a number in field 1, as these are.
using Request = google::protobuf::StringValue;
using Answer = google::protobuf::Int32Value;

absl::StatusOr<int> Check(const Context& context, const std::string& service) {
  const auto targets = internal::SplitTargets(context.server);
  if (!targets.ok()) return targets.status();
  if (targets->size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", context.server, "' names ", targets->size(),
                     " servers, and health is that of one: name one of them with --server"));
  }
  ClientOptions options;
  options.tls = context.connection.tls;  // it asks for no token
  auto credentials = internal::MakeChannelCredentials(options);
  if (!credentials.ok()) return credentials.status();
  grpc::TemplatedGenericStub<Request, Answer> stub(grpc::CreateCustomChannel(
      context.server, *credentials, internal::ArgumentsFor(context.server, options)));
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() +
                    std::chrono::duration_cast<std::chrono::system_clock::duration>(
                        std::chrono::duration<double>(context.timeout_seconds.value_or(kHealthSeconds))));
  Request request;
  request.set_value(service);
  Answer answer;
  absl::Status result;
  absl::Notification ended;
  stub.UnaryCall(&call, kMethod, {}, &request, &answer, [&](const grpc::Status& status) {
    result = internal::FromGrpcStatus(status);
    ended.Notify();
  });
  ended.WaitForNotification();
  if (!result.ok()) return internal::Explain(result, context.server, options);
  return answer.value();
}

absl::Status RunHealth(const Context& context, const std::string& service) {
  const auto health = Check(context, service);
  if (absl::IsNotFound(health.status())) {
    return WithAdvice(health.status(),
                      absl::StrCat("'", context.server, "' knows no service '", service,
                                   "': without --service it tells whether it takes work; 'liveness' is a "
                                   "service of the address of --health_listen only"));
  }
  if (absl::IsInvalidArgument(health.status())) return health.status();
  if (!health.ok()) {
    return WithAdvice(health.status(), absl::StrCat("is lossd running at '", context.server,
                                                    "', and is that an address with health?"));
  }
  if (*health != kServing) {
    return WithAdvice(
        absl::UnavailableError(absl::StrCat("lossd at '", context.server, "' is not serving")),
        "it loads weights, drains, or waits for a rank that is stuck: 'lossctl status' and its log "
        "say which");
  }
  context.Print({{"server", context.server}, {"service", service}, {"status", "SERVING"}}, "serving\n");
  return absl::OkStatus();
}

}  // namespace

void AddHealthCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("health", "Tell by the exit code whether the server takes work");
  AddCommonOptions(*command, context);
  const auto service = std::make_shared<std::string>();
  command->add_option("--service", *service, "Ask for this service (default: none, the server as a whole)")
      ->type_name("NAME");
  command->footer(
      "Asks the standard health service once and does not wait for a server that is not there.\n\n"
      "Examples:\n"
      "  lossctl health --server 127.0.0.1:50052                      # the address of --health_listen\n"
      "  lossctl health --server 127.0.0.1:50052 --service liveness   # also while it loads or drains\n");
  command->callback(
      [&context, service] { context.run = [&context, service] { return RunHealth(context, *service); }; });
}

}  // namespace lossd::tools
