#include "client/examples/train_lm/text/tokenizer.h"

#include <filesystem>
#include <sstream>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/examples/train_lm/text/filter_process.h"

namespace lossd::train_lm {
namespace {

constexpr char kProgram[] = "train_lm_tokenizer";

absl::StatusOr<Tokens> ReadTokens(std::istream& input) {
  std::string line;
  if (!std::getline(input, line)) return absl::InternalError(absl::StrCat(kProgram, " ended early"));
  std::istringstream numbers(line);
  Tokens tokens;
  for (int32_t token = 0; numbers >> token;) tokens.push_back(token);
  return tokens;
}

absl::Status ReadAll(std::istream& input, size_t paragraphs, std::vector<Tokens>* all) {
  for (size_t i = 0; i < paragraphs; ++i) {
    absl::StatusOr<Tokens> tokens = ReadTokens(input);
    if (!tokens.ok()) return tokens.status();
    all->push_back(*std::move(tokens));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizedText> Tokenize(std::span<const std::string_view> training,
                                       std::span<const std::string_view> held_out,
                                       int64_t largest_vocabulary) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return absl::InternalError(absl::StrCat("cannot find this program's folder: ", error.message()));
  std::string request;
  for (const std::string_view paragraph : training) request.append("+").append(paragraph).append("\n");
  for (const std::string_view paragraph : held_out) request.append("-").append(paragraph).append("\n");
  const absl::StatusOr<std::string> answer =
      RunFilter({(self.parent_path() / kProgram).string(), std::to_string(largest_vocabulary)}, request);
  if (!answer.ok()) return answer.status();

  std::istringstream lines(*answer);
  TokenizedText text;
  std::string line;
  std::getline(lines, line);
  if (!(std::istringstream(line) >> text.vocabulary >> text.begin_id >> text.end_id)) {
    return absl::InvalidArgumentError(absl::StrCat("no tokenizer can be made from this text: ", line));
  }
  if (absl::Status read = ReadAll(lines, training.size(), &text.training); !read.ok()) return read;
  if (absl::Status read = ReadAll(lines, held_out.size(), &text.held_out); !read.ok()) return read;
  return text;
}

}  // namespace lossd::train_lm
