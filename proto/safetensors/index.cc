#include "proto/safetensors/index.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace lossd {
namespace {

constexpr char kMapKey[] = "weight_map";

// Takes the parser's events, so that nested values, however deep, cost nothing.
class IndexHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool found() const { return found_; }
  const std::string& error() const { return error_; }
  std::map<std::string, std::string> TakeMap() { return std::move(map_); }

  bool null() override { return Other(); }
  bool boolean(bool) override { return Other(); }
  bool number_integer(number_integer_t) override { return Other(); }
  bool number_unsigned(number_unsigned_t) override { return Other(); }
  bool number_float(number_float_t, const string_t&) override { return Other(); }
  bool binary(binary_t&) override { return Other(); }

  bool string(string_t& value) override {
    if (!InMap()) return Other();
    if (map_.emplace(key_, value).second) return true;
    return Fail(absl::StrCat("names tensor '", key_, "' twice"));
  }

  bool start_object(size_t) override {
    if (IsMap()) {
      if (found_) return Fail(absl::StrCat("has '", kMapKey, "' twice"));
      found_ = true;
      in_map_ = true;
    } else if (!Other()) {
      return false;
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(size_t) override {
    if (!Other()) return false;
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }

  bool key(string_t& value) override {
    if (depth_ == 1 || InMap()) key_ = value;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("is not valid JSON near byte ", position));
  }

 private:
  // Whether a value that begins now is the map, or belongs to it.
  bool IsMap() const { return depth_ == 1 && !in_map_ && key_ == kMapKey; }
  bool InMap() const { return in_map_ && depth_ == 2; }

  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }
  // A value that is no file's name.
  bool Other() {
    if (IsMap()) return Fail(absl::StrCat("has a '", kMapKey, "' that is not an object"));
    if (InMap()) return Fail(absl::StrCat("maps tensor '", key_, "' to what is not a file's name"));
    return true;
  }

  std::map<std::string, std::string> map_;
  std::string error_;
  std::string key_;
  size_t depth_ = 0;  // objects and arrays around what comes next
  bool in_map_ = false;
  bool found_ = false;
};

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(absl::string_view json) {
  IndexHandler handler;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return absl::InvalidArgumentError(handler.error());
  }
  if (!handler.found()) return absl::InvalidArgumentError(absl::StrCat("has no object '", kMapKey, "'"));
  return handler.TakeMap();
}

}  // namespace lossd
