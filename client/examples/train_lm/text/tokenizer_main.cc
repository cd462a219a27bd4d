// train_lm_tokenizer VOCABULARY: a filter around SentencePiece.
//
// Standard input: one paragraph a line, behind a '+' if the tokenizer is to be trained on it and a '-' if
// not. Standard output: a line with the size of the vocabulary and the ids of <s> and </s>, then for each
// paragraph a line with its tokens. If no tokenizer can be made there is one line that says why, and the exit
// status is 1.
#include <charconv>
#include <iostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "client/examples/train_lm/text/sentence_piece.h"

namespace {

// A line without the sign in front.
std::string_view Paragraph(std::string_view line) {
  line.remove_prefix(line.empty() ? 0 : 1);
  return line;
}

}  // namespace

int main(int argc, char** argv) {
  int vocabulary = 0;
  const std::string_view said = argc == 2 ? argv[1] : "";
  const auto [end, error_code] = std::from_chars(said.data(), said.data() + said.size(), vocabulary);
  if (error_code != std::errc() || end != said.data() + said.size()) {
    std::cerr << "usage: train_lm_tokenizer VOCABULARY < PARAGRAPHS\n";
    return 2;
  }
  std::ios::sync_with_stdio(false);
  std::vector<std::string> lines;
  for (std::string line; std::getline(std::cin, line);) lines.push_back(line);
  std::vector<std::string_view> training;
  for (const std::string& line : lines) {
    if (line.starts_with('+')) training.push_back(Paragraph(line));
  }
  std::string error;
  const auto tokenizer = lossd::train_lm::SentencePiece::Train(training, vocabulary, &error);
  if (tokenizer == nullptr) {
    std::cout << error << '\n';
    return 1;
  }
  std::cout << tokenizer->vocabulary() << ' ' << tokenizer->begin_id() << ' ' << tokenizer->end_id() << '\n';
  for (const std::string& line : lines) {
    for (const int32_t token : tokenizer->Encode(Paragraph(line))) {
      std::cout << token << ' ';
    }
    std::cout << '\n';
  }
  return std::cout.flush() ? 0 : 1;
}
