#include "proto/safetensors/header.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace lossd {
namespace {

constexpr char kMetadataKey[] = "__metadata__";
// Far above any real tensor; bounds what a hostile header can make us keep.
constexpr size_t kMaxRank = 64;

struct DtypeBits {
  absl::string_view name;
  int64_t bits;
};
constexpr DtypeBits kDtypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16}, {"BF16", 16}, {"I32", 32},
    {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64}, {"U64", 64},
};

const DtypeBits* FindDtype(absl::string_view name) {
  const auto* found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                   [&](const DtypeBits& candidate) { return candidate.name == name; });
  return found == std::end(kDtypes) ? nullptr : found;
}

// Receives the parser's events, so that a malformed header is refused at its first wrong token, and repeated
// keys, which a document tree would merge, are seen.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  SafetensorsHeader TakeHeader() { return std::move(header_); }
  const std::string& error() const { return error_; }

  bool null() override { return Skips() || Unexpected("null"); }
  bool boolean(bool) override { return Skips() || Unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return Skips() || Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override {
    return Skips() || Unexpected(absl::StrCat("the number ", text.substr(0, 40)));
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (Skips()) return true;
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max())) {
      return Unexpected(absl::StrCat("the number ", value));
    }
    if (place_ == Place::kShape && tensor_.shape.size() < kMaxRank) {
      tensor_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsets && offsets_.size() < 2) {
      offsets_.push_back(static_cast<int64_t>(value));
      return true;
    }
    return Unexpected("a number");
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata[key_] = value;
      return true;
    }
    if (place_ == Place::kTensor && key_ == "dtype") {
      tensor_.dtype = value;
      return true;
    }
    return Skips() || Unexpected("a string");
  }

  bool start_object(size_t) override {
    if (Skips()) return Enter();
    switch (place_) {
      case Place::kStart:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        keys_.clear();
        place_ = key_ == kMetadataKey ? Place::kMetadata : Place::kTensor;
        tensor_ = {.name = key_};
        offsets_.clear();
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(string_t& value) override {
    if (skipped_depth_ > 0) return true;
    key_ = value;
    if (Skips()) return true;
    std::set<std::string>& seen = place_ == Place::kTop ? names_ : keys_;
    if (!seen.insert(value).second) return Fail(absl::StrCat("the key '", value, "' occurs twice"));
    return true;
  }

  bool end_object() override {
    if (skipped_depth_ > 0) return Leave();
    if (place_ == Place::kTop) {
      place_ = Place::kEnd;
      return true;
    }
    if (place_ == Place::kTensor) {
      for (const char* needed : {"dtype", "shape", "data_offsets"}) {
        if (keys_.count(needed) == 0) {
          return Fail(absl::StrCat("tensor '", tensor_.name, "' has no ", needed));
        }
      }
      tensor_.begin = offsets_[0];
      tensor_.end = offsets_[1];
      header_.tensors.push_back(std::move(tensor_));
    }
    place_ = Place::kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
      return true;
    }
    if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
      return true;
    }
    return Skips() ? Enter() : Unexpected("an array");
  }

  bool end_array() override {
    if (skipped_depth_ > 0) return Leave();
    if (place_ == Place::kOffsets && offsets_.size() != 2) {
      return Fail(absl::StrCat("data_offsets of tensor '", tensor_.name, "' has ", offsets_.size(),
                               " elements, not 2"));
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("not valid JSON near byte ", position, " of the header"));
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };

  // Whether a value that begins now, or the one around it, is of a key that this version does not know.
  bool Skips() const {
    return skipped_depth_ > 0 ||
           (place_ == Place::kTensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets");
  }
  bool Enter() {
    ++skipped_depth_;
    return true;
  }
  bool Leave() {
    --skipped_depth_;
    return true;
  }
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }
  bool Unexpected(absl::string_view what) {
    if (place_ == Place::kStart) return Fail(absl::StrCat("expected a JSON object, found ", what));
    return Fail(absl::StrCat("unexpected ", what, " at key '", key_, "'",
                             tensor_.name.empty() ? "" : absl::StrCat(" of tensor '", tensor_.name, "'")));
  }

  SafetensorsHeader header_;
  std::string error_;
  Place place_ = Place::kStart;
  std::string key_;
  size_t skipped_depth_ = 0;     // objects and arrays around what comes next, in a value that is skipped
  std::set<std::string> names_;  // keys of the top object
  std::set<std::string> keys_;   // keys of the object inside it
  SafetensorsEntry tensor_;
  std::vector<int64_t> offsets_;
};

// The tensors, sorted by offset, must follow each other from 0 to data_bytes.
absl::Status CheckCoverage(const std::vector<SafetensorsEntry>& tensors, int64_t data_bytes) {
  int64_t expected = 0;
  for (const SafetensorsEntry& tensor : tensors) {
    // The format gains dtypes. Only the place of a tensor of a new one can be checked.
    const bool known = FindDtype(tensor.dtype) != nullptr;
    const auto bytes = known ? SafetensorsBytes(tensor.dtype, tensor.shape)
                             : absl::StatusOr<int64_t>(tensor.end - tensor.begin);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", tensor.name, "': ", bytes.status().message()));
    }
    if (tensor.begin > tensor.end || tensor.end > data_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "' claims bytes ", tensor.begin,
                                                     " to ", tensor.end, " of ", data_bytes,
                                                     " (truncated file?)"));
    }
    if (tensor.end - tensor.begin != *bytes) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "' has ",
                                                     tensor.end - tensor.begin,
                                                     " bytes; its dtype and shape need ", *bytes));
    }
    if (tensor.begin != expected) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "' starts at byte ",
                                                     tensor.begin, ", the one before it ends at ", expected,
                                                     " (", tensor.begin < expected ? "overlap" : "gap", ")"));
    }
    expected = tensor.end;
  }
  if (expected != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensors cover ", expected, " bytes; the file holds ", data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> SafetensorsBytes(absl::string_view dtype, const std::vector<int64_t>& shape) {
  const DtypeBits* known = FindDtype(dtype);
  if (known == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("unknown dtype '", dtype, "'"));
  }
  int64_t bits = known->bits;
  for (int64_t size : shape) {
    if (size < 0) return absl::InvalidArgumentError(absl::StrCat("negative size ", size, " in the shape"));
    if (__builtin_mul_overflow(bits, size, &bits)) {
      return absl::InvalidArgumentError("the product of the shape overflows");
    }
  }
  if (bits % 8 != 0) return absl::InvalidArgumentError("the elements do not fill whole bytes");
  return bits / 8;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json, int64_t data_bytes) {
  // The format demands it; it also keeps a byte order mark or leading blanks from making two readers
  // disagree.
  if (json.empty() || json.front() != '{') {
    return absl::InvalidArgumentError("the header does not start with '{'");
  }
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return absl::InvalidArgumentError(handler.error());
  }
  SafetensorsHeader header = handler.TakeHeader();
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  if (absl::Status status = CheckCoverage(header.tensors, data_bytes); !status.ok()) return status;
  return header;
}

absl::StatusOr<std::string> SerializeSafetensorsHeader(const SafetensorsHeader& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[kMetadataKey] = header.metadata;
  for (const SafetensorsEntry& tensor : header.tensors) {
    json[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  if (static_cast<int64_t>(text.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the header would have ", text.size(),
                                                   " bytes, more than the ", kMaxSafetensorsHeaderBytes,
                                                   " of the format"));
  }
  // Whatever a reader would refuse must not be written; reading it back also shows names that were repeated
  // or, not being UTF-8, replaced.
  auto parsed = ParseSafetensorsHeader(text, header.tensors.empty() ? 0 : header.tensors.back().end);
  if (!parsed.ok()) return parsed.status();
  if (parsed->metadata != header.metadata) return absl::InvalidArgumentError("metadata is not valid UTF-8");
  std::set<std::string> names;
  for (const SafetensorsEntry& tensor : parsed->tensors) names.insert(tensor.name);
  for (const SafetensorsEntry& tensor : header.tensors) {
    if (names.erase(tensor.name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("the tensor name '", tensor.name, "' is repeated, reserved or not valid UTF-8"));
    }
  }
  return text;
}

}  // namespace lossd
