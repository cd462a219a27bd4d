#include "client/tools/lossctl/context.h"

#include <chrono>
#include <cstdio>
#include <utility>

#include "CLI/Option.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/names.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

// Short enough for a script that asks whether a server is there.
constexpr double kReachSeconds = 10;
// A flush waits until the device has applied what was sent.
constexpr double kAnswerSeconds = 60;
// Thirty years; in nanoseconds still a number of 64 bits.
constexpr double kMostSeconds = 1e9;

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Context::Connect() const {
  if (absl::StrContains(server, '/') && !absl::StrContains(server, ':')) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the server is '", server,
        "', a path; name its address, HOST:PORT or unix:PATH, with --server or LOSSD_SERVER (the program "
        "that Python starts is LOSSD_BINARY)"));
  }
  ClientOptions options;
  options.reconnect_timeout = Milliseconds(timeout_seconds.value_or(kReachSeconds));
  options.call_timeout = Milliseconds(timeout_seconds.value_or(kAnswerSeconds));
  connection.SetIn(options);
  auto client = Client::Connect(server, options);
  if (client.ok()) return client;
  const absl::Status status = NameFlags(client.status());
  const bool explained = absl::IsInvalidArgument(status) || absl::IsUnauthenticated(status) ||
                         absl::IsPermissionDenied(status) || absl::IsUnimplemented(status) ||
                         absl::StrContains(status.message(), "--tls_");
  if (!explained) {
    return WithAdvice(status, absl::StrCat("is lossd running at '", server,
                                           "'? name its address with --server or LOSSD_SERVER"));
  }
  return status;
}

void Context::Print(const nlohmann::ordered_json& json_result, const std::string& text) const {
  const std::string output = json ? json_result.dump(2) + "\n" : text;
  std::fwrite(output.data(), 1, output.size(), stdout);
}

ProgressBar::Style Context::progress_style() const {
  const ProgressBar::Style style = ProgressBar::StyleOfStderr();
  return json && style == ProgressBar::Style::kLines ? ProgressBar::Style::kSilent : style;
}

void AddCommonOptions(CLI::App& app, Context& context) {
  constexpr char kGroup[] = "Common options";
  app.add_option("--server", context.server,
                 "Address of lossd, or those of its replicas with commas between them: whichever answers is "
                 "asked (default: LOSSD_SERVER, or 127.0.0.1:50051)")
      ->type_name("HOST:PORT")
      ->group(kGroup);
  app.add_option(
         "--timeout", context.timeout_seconds,
         "Wait this long to reach the server and for each answer (default: 10 to reach it, 60 for answers); "
         "transfers take as long as they need")
      ->type_name("SECONDS")
      ->check(Seconds())
      ->group(kGroup);
  AddConnectionOptions(app, context.connection, kGroup);
  CLI::Option* token_file = app.get_option("--token_file");
  token_file->description(absl::StrCat(token_file->get_description(), " (default: LOSSD_TOKEN_FILE)"));
  app.add_flag("--json", context.json, "Print JSON: results on standard output, errors on standard error")
      ->group(kGroup);
}

CLI::Validator PositiveInteger() {
  return CLI::Validator(
      [](const std::string& text) {
        int64_t value = 0;
        return absl::SimpleAtoi(text, &value) && value > 0
                   ? std::string()
                   : absl::StrCat("'", text, "' is not a whole number above 0");
      },
      "", "positive integer");
}

CLI::Validator Seconds() {
  return CLI::Validator(
      [](const std::string& text) {
        double value = 0;
        return absl::SimpleAtod(text, &value) && value > 0 && value <= kMostSeconds
                   ? std::string()
                   : absl::StrCat("'", text, "' is not a number above 0 and at most 1e9");
      },
      "", "seconds");
}

CLI::Option* AddDtypeOption(CLI::App& app, std::string& dtype, const std::string& description) {
  return app.add_option("--dtype", dtype, description)
      ->type_name("DTYPE")
      ->check(CLI::IsMember(LongDataTypeNames()))
      ->transform([](const std::string& name) {
        const auto known = DataTypeNames().find(name);
        return known == DataTypeNames().end() ? name : std::string(Name(known->second));
      });
}

std::optional<DataType> ParseDtype(const std::string& dtype) {
  const auto known = DataTypeNames().find(dtype);
  return known == DataTypeNames().end() ? std::nullopt : std::optional<DataType>(known->second);
}

std::string WithCommas(int64_t number) {
  std::string digits = absl::StrCat(number);
  const size_t sign = number < 0 ? 1 : 0;
  for (size_t at = digits.size(); at > sign + 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

}  // namespace lossd::tools
