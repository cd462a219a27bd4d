#include "client/tools/lossctl/errors.h"

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

constexpr char kAdvicePayload[] = "lossctl/advice";

// What helps whatever the command was.
std::string GeneralAdvice(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kUnavailable:
      return "see whether lossd is still running, and if it is one of several replicas whether all of them "
             "are, then run the command again";
    case absl::StatusCode::kUnimplemented:
      return "name the address of lossd's --listen with --server; the port of --health_listen serves health "
             "alone, and an "
             "older lossd not every call";
    case absl::StatusCode::kDeadlineExceeded:
      return "the server is there but slow to answer: try again, or wait longer with --timeout";
    default:
      return "";
  }
}

std::string AdviceOf(const absl::Status& status) {
  auto payload = status.GetPayload(kAdvicePayload);
  return payload ? std::string(*payload) : GeneralAdvice(status.code());
}

// gRPC says nothing where a server has no such service.
std::string MessageOf(const absl::Status& status) {
  if (!status.message().empty()) return std::string(status.message());
  return absl::IsUnimplemented(status)
             ? "the server does not serve this call"
             : absl::StrCat("the call failed: ", absl::StatusCodeToString(status.code()));
}

std::string Format(absl::string_view code, ExitCode exit_code, absl::string_view message,
                   absl::string_view advice, bool json) {
  if (!json) {
    return absl::StrCat("lossctl: ", message, "\n", advice.empty() ? "" : absl::StrCat("  ", advice, "\n"));
  }
  nlohmann::ordered_json error = {{"code", std::string(code)},
                                  {"exit_code", static_cast<int>(exit_code)},
                                  {"message", std::string(message)}};
  if (!advice.empty()) error["advice"] = std::string(advice);
  // A message may quote bytes that are not UTF-8.
  return nlohmann::ordered_json{{"error", error}}.dump(2, ' ', false,
                                                       nlohmann::ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace

ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return ExitCode::kOk;
    case absl::StatusCode::kNotFound:
      return ExitCode::kNotFound;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return ExitCode::kUnreachable;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
      return ExitCode::kRefused;
    case absl::StatusCode::kResourceExhausted:
      return ExitCode::kExhausted;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return ExitCode::kInvalid;
    default:
      return ExitCode::kFailed;
  }
}

std::string ExitCodesHelp() {
  return "Exit codes:\n"
         "  0 done\n"
         "  1 failed (none of the reasons below)\n"
         "  2 usage: the command line is wrong\n"
         "  3 not found: head, file or tensor\n"
         "  4 server unreachable, or no answer in time\n"
         "  5 refused: the head's state forbids it, or the name is taken\n"
         "  6 out of resources: memory at the server, space here\n"
         "  7 invalid: a value or a file is not acceptable\n";
}

absl::Status WithAdvice(absl::Status status, absl::string_view advice) {
  if (!status.ok() && !advice.empty() && !status.GetPayload(kAdvicePayload)) {
    status.SetPayload(kAdvicePayload, absl::Cord(advice));
  }
  return status;
}

std::string CreateAdvice(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kAlreadyExists:
      return "choose another name, or delete that head first; 'lossctl head list' shows its sizes";
    case absl::StatusCode::kResourceExhausted:
      return "'lossctl memory' shows what is reserved; delete a head, or give the server more memory";
    default:
      return "";
  }
}

std::string NotFoundAdvice(const absl::Status& status) {
  const bool said = absl::StrContains(status.message(), "lossctl head list");
  return absl::IsNotFound(status) && !said ? "'lossctl head list' shows those there" : "";
}

std::string FormatError(const absl::Status& status, bool json) {
  return Format(absl::StatusCodeToString(status.code()), ExitCodeOf(status), MessageOf(status),
                AdviceOf(status), json);
}

std::string FormatUsageError(absl::string_view message, absl::string_view command, bool json) {
  return Format("USAGE", ExitCode::kUsage, message, absl::StrCat("see '", command, " --help'"), json);
}

}  // namespace lossd::tools
