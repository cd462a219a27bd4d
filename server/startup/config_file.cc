#include "server/startup/config_file.h"

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lossd {
namespace {

using nlohmann::json;

absl::Status InvalidConfig(const std::string& message) {
  return absl::InvalidArgumentError(absl::StrCat("--config: ", message));
}

// Looks at what the library parses, which takes the last of two values of one name and forgets the other.
class Watch {
 public:
  // Nothing in a configuration goes so deep. What writes a value out again, for a flag or for a message,
  // calls itself for what is inside.
  static constexpr int kMostDepth = 32;

  struct Found {
    std::string repeated;  // key
    bool too_deep = false;
  };
  explicit Watch(Found* found) : found_(found) {}

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    found_->too_deep = found_->too_deep || depth > kMostDepth;
    if (found_->too_deep) return false;
    if (event == json::parse_event_t::object_start) open_.emplace_back();
    if (event == json::parse_event_t::object_end) open_.pop_back();
    if (event == json::parse_event_t::key && !open_.back().insert(parsed.get<std::string>()).second &&
        found_->repeated.empty()) {
      found_->repeated = parsed.get<std::string>();
    }
    return true;
  }

 private:
  Found* const found_;
  std::vector<std::set<std::string>> open_;  // keys of the objects that we are in
};

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path);
  if (!file) return InvalidConfig(absl::StrCat("cannot read ", path));
  try {
    return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  } catch (const std::ios_base::failure&) {  // the buffer's way to say that this is a folder, or that a disk
    return InvalidConfig(absl::StrCat("cannot read ", path));  // fails
  }
}

absl::StatusOr<json> ParseObject(absl::string_view text, const std::string& path) {
  Watch::Found found;
  json config = json::parse(text.begin(), text.end(), Watch(&found), /*allow_exceptions=*/false);
  if (found.too_deep || !config.is_object()) {
    return InvalidConfig(absl::StrCat(path, found.too_deep
                                                ? " has values inside each other that no flag and no head has"
                                                : " is not a JSON object"));
  }
  if (found.repeated.empty()) return config;
  return InvalidConfig(
      absl::StrCat(path, " has '", found.repeated, "' twice in one object; it must be there once"));
}

absl::Status SetFlag(const std::string& name, const json& value) {
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  if (flag == nullptr || name == "config") {
    return InvalidConfig(absl::StrCat("there is no flag '", name, "'"));
  }
  const bool text_only = flag->IsOfType<std::string>();
  if (value.is_structured() || value.is_null() || (text_only && !value.is_string())) {
    return InvalidConfig(absl::StrCat(name, " is ", value.dump(), "; it must be ",
                                      text_only ? "text" : "one value: text, a number, true or false"));
  }
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  std::string error;
  if (flag->ParseFrom(text, &error)) return absl::OkStatus();
  return InvalidConfig(absl::StrCat("'", text, "' is no value for ", name, ": ", error));
}

absl::StatusOr<std::vector<HeadEntry>> ReadHeads(const json& entries) {
  if (!entries.is_array()) {
    return InvalidConfig(absl::StrCat("heads is ", entries.is_object() ? "an object" : entries.dump(),
                                      "; it must be a list: [{\"name\": ...}, ...]"));
  }
  std::vector<HeadEntry> heads;
  std::set<std::string> names;
  for (const json& entry : entries) {
    absl::StatusOr<HeadEntry> head = ReadHeadEntry(entry);
    if (!head.ok()) return head.status();
    if (!names.insert(head->config.name).second) {
      return InvalidConfig(absl::StrCat("heads has '", head->config.name, "' twice"));
    }
    heads.push_back(*std::move(head));
  }
  return heads;
}

}  // namespace

absl::StatusOr<std::vector<HeadEntry>> ReadConfigFile(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadText(path);
  if (!text.ok()) return text.status();
  return ParseConfig(*text, path, &SetFlag);
}

absl::StatusOr<std::vector<HeadEntry>> ParseConfig(absl::string_view text, const std::string& path,
                                                   ConfigFlag set_flag) {
  const absl::StatusOr<json> config = ParseObject(text, path);
  if (!config.ok()) return config.status();
  std::vector<HeadEntry> heads;
  for (const auto& [name, value] : config->items()) {
    if (name == "heads") {
      absl::StatusOr<std::vector<HeadEntry>> read = ReadHeads(value);
      if (!read.ok()) return read;
      heads = *std::move(read);
    } else if (absl::Status status = set_flag(name, value); !status.ok()) {
      return status;
    }
  }
  return heads;
}

}  // namespace lossd
