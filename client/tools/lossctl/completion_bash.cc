// The completion script for bash: finds the command from the words typed so far, then offers what that
// command takes.
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tools/lossctl/completion.h"

namespace lossd::tools {
namespace {

constexpr char kBashPrologue[] = R"sh(# bash completion for lossctl; made by 'lossctl completion bash'.
_lossctl_offer() {
  mapfile -t COMPREPLY < <(compgen -W "$1" -- "$cur")
}
_lossctl_files() {
  compopt -o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(compgen -f -- "$cur")
}
_lossctl_heads() {
  _lossctl_offer "$(lossctl __heads "${connection[@]}" 2>/dev/null)"
}
_lossctl() {
  local command=lossctl connection=() words=() word value cur prev i glue="" positional=0
  COMPREPLY=()
  # bash cuts words at ':' and '=', so that "--server=host:1" are five; they are put together again. What is offered
  # replaces only the last piece.
  for ((i = 0; i <= COMP_CWORD; ++i)); do
    cur=${COMP_WORDS[i]}
    if [[ $i -gt 0 && ( -n $glue || $cur == +([:=]) ) ]]; then
      words[-1]+=$cur
    else
      words+=("$cur")
    fi
    glue=""
    if [[ $cur == +([:=]) ]]; then
      glue=1
      cur=""
    fi
  done
  prev=${words[-2]}
  [[ ${words[-1]} == --*=* ]] && prev=${words[-1]%%=*}
  for ((i = 1; i < ${#words[@]} - 1; ++i)); do
    word=${words[i]}
    case "$command:${word%%=*}" in
)sh";

constexpr char kBashAfterOptions[] = R"sh()
        if [[ $word == *=* ]]; then
          value=${word#*=}
        else
          value=${words[++i]}
        fi
        # Needed to ask that server for the names of its heads.
        [[ ${word%%=*} == --@(server|tls_*|token_file) && -n $value ]] && connection+=("${word%%=*}" "$value")
        ;;
      *:--token_over_plain_text) connection+=("$word") ;;
      *:-*) ;;
      *) ((++positional)) ;;
    esac
  done
  case "$command:$prev" in
)sh";

std::string BashOffer(const CompletionValue& value) {
  switch (value.kind) {
    case ValueKind::kNothing:
      return ":";
    case ValueKind::kChoice:
      return absl::StrCat("_lossctl_offer ", ShellQuote(absl::StrJoin(value.choices, " ")));
    case ValueKind::kFile:
      return "_lossctl_files";
    case ValueKind::kHead:
      return "_lossctl_heads";
  }
  return ":";
}  // namespace lossd::tools

// "lossctl head":--out|"lossctl head":-o
std::string BashPattern(const std::string& path, const std::vector<std::string>& words) {
  return absl::StrJoin(words, "|", [&path](std::string* out, const std::string& word) {
    absl::StrAppend(out, ShellQuote(absl::StrCat(path, ":", word)));
  });
}

std::string BashValues(const std::map<std::string, std::string>& values) {
  std::string text;
  for (const auto& [offer, patterns] : values) {
    absl::StrAppend(&text, "    ", patterns, ") ", offer, "; return ;;\n");
  }
  return text;
}

}  // namespace

std::string BashCompletion(const CompletionCommand& root) {
  std::string descend;
  std::string skip_values;
  std::map<std::string, std::string> values;  // what to offer: the patterns it is offered for
  std::string options;
  std::string positionals;
  for (const CompletionCommand* command : AllCommands(root)) {
    std::vector<std::string> names;
    for (const CompletionOption& option : command->options) {
      names.insert(names.end(), option.names.begin(), option.names.end());
      if (!option.takes_value) continue;
      const std::string pattern = BashPattern(command->path, option.names);
      absl::StrAppend(&skip_values, skip_values.empty() ? "      " : "|", pattern);
      std::string& patterns = values[BashOffer(option.value)];
      absl::StrAppend(&patterns, patterns.empty() ? "" : "|", pattern);
    }
    absl::StrAppend(&options, "      ", ShellQuote(command->path), ") _lossctl_offer ",
                    ShellQuote(absl::StrJoin(names, " ")), " ;;\n");

    std::vector<std::string> subcommands;
    for (const CompletionCommand& subcommand : command->subcommands) {
      subcommands.push_back(subcommand.name);
      absl::StrAppend(&descend, "      ", BashPattern(command->path, {subcommand.name}),
                      ") command=", ShellQuote(subcommand.path), "; positional=0 ;;\n");
    }
    if (!subcommands.empty()) {
      absl::StrAppend(&positionals, "    ", BashPattern(command->path, {"0"}), ") _lossctl_offer ",
                      ShellQuote(absl::StrJoin(subcommands, " ")), " ;;\n");
    }
    for (size_t i = 0; i < command->positionals.size(); ++i) {
      absl::StrAppend(&positionals, "    ", BashPattern(command->path, {absl::StrCat(i)}), ") ",
                      BashOffer(command->positionals[i]), " ;;\n");
    }
  }
  return absl::StrCat(kBashPrologue, descend, skip_values, kBashAfterOptions, BashValues(values), "  esac\n",
                      "  if [[ $cur == -* ]]; then\n    case \"$command\" in\n", options,
                      "    esac\n    return\n  fi\n", "  case \"$command:$positional\" in\n", positionals,
                      "  esac\n}\ncomplete -F _lossctl lossctl\n");
}

}  // namespace lossd::tools
