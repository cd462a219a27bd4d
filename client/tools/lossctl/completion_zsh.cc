// The completion script for zsh: the same walk as for bash, with a description beside each candidate.
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/tools/lossctl/completion.h"

namespace lossd::tools {
namespace {

constexpr char kZshPrologue[] = R"sh(#compdef lossctl
# zsh completion for lossctl; made by 'lossctl completion zsh'.
_lossctl_heads() {
  local -a heads
  heads=(${(f)"$(lossctl __heads $connection 2>/dev/null)"})
  compadd -a heads
}
_lossctl() {
  local command=lossctl word value prev=${words[CURRENT-1]} i positional=0
  local -a candidates connection
  if [[ ${words[CURRENT]} == --*=* ]]; then
    prev=${words[CURRENT]%%=*}
    compset -P '*='
  fi
  for ((i = 2; i < CURRENT; ++i)); do
    word=${words[i]}
    case "$command:${word%%=*}" in
)sh";

constexpr char kZshAfterOptions[] = R"sh()
        if [[ $word == *=* ]]; then
          value=${word#*=}
        else
          value=${words[++i]}
        fi
        case "${word%%=*}" in
          (--server|--tls_*|--token_file) [[ -n $value ]] && connection+=("${word%%=*}" "$value") ;;
        esac
        ;;
      (*:--token_over_plain_text) connection+=("$word") ;;
      (*:-*) ;;
      (*) ((++positional)) ;;
    esac
  done
  case "$command:$prev" in
)sh";

constexpr char kEpilogue[] = R"sh(  esac
}
# Autoloaded from $fpath, this file is the function's body; sourced, it has to register it.
if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
  _lossctl "$@"
else
  compdef _lossctl lossctl
fi
)sh";

std::string ZshOffer(const CompletionValue& value) {
  switch (value.kind) {
    case ValueKind::kNothing:
      return "_message value";
    case ValueKind::kChoice:
      return absl::StrCat("compadd -- ", absl::StrJoin(value.choices, " "));
    case ValueKind::kFile:
      return "_files";
    case ValueKind::kHead:
      return "_lossctl_heads";
  }
  return ":";
}

std::string ZshPattern(const std::string& path, const std::vector<std::string>& words) {
  return absl::StrJoin(words, "|", [&path](std::string* out, const std::string& word) {
    absl::StrAppend(out, ShellQuote(absl::StrCat(path, ":", word)));
  });
}

// 'name:description'; a colon inside the name has to be escaped.
std::string Candidate(const std::string& name, const std::string& description) {
  return ShellQuote(absl::StrCat(absl::StrReplaceAll(name, {{":", "\\:"}}), ":", description));
}

std::string ZshValues(const std::map<std::string, std::string>& values) {
  std::string text;
  for (const auto& [offer, patterns] : values) {
    absl::StrAppend(&text, "    (", patterns, ") ", offer, "; return ;;\n");
  }
  return text;
}

}  // namespace

std::string ZshCompletion(const CompletionCommand& root) {
  std::string descend;
  std::string skip_values;
  std::map<std::string, std::string> values;  // what to offer: the patterns it is offered for
  std::string options;
  std::string positionals;
  for (const CompletionCommand* command : AllCommands(root)) {
    std::vector<std::string> names;
    for (const CompletionOption& option : command->options) {
      for (const std::string& name : option.names) names.push_back(Candidate(name, option.description));
      if (!option.takes_value) continue;
      const std::string pattern = ZshPattern(command->path, option.names);
      absl::StrAppend(&skip_values, skip_values.empty() ? "      (" : "|", pattern);
      std::string& patterns = values[ZshOffer(option.value)];
      absl::StrAppend(&patterns, patterns.empty() ? "" : "|", pattern);
    }
    absl::StrAppend(&options, "      (", ShellQuote(command->path), ") candidates=(",
                    absl::StrJoin(names, " "), ") ;;\n");

    std::vector<std::string> subcommands;
    for (const CompletionCommand& subcommand : command->subcommands) {
      subcommands.push_back(Candidate(subcommand.name, subcommand.description));
      absl::StrAppend(&descend, "      (", ZshPattern(command->path, {subcommand.name}),
                      ") command=", ShellQuote(subcommand.path), "; positional=0 ;;\n");
    }
    if (!subcommands.empty()) {
      absl::StrAppend(&positionals, "    (", ZshPattern(command->path, {"0"}), ") candidates=(",
                      absl::StrJoin(subcommands, " "), "); _describe command candidates ;;\n");
    }
    for (size_t i = 0; i < command->positionals.size(); ++i) {
      absl::StrAppend(&positionals, "    (", ZshPattern(command->path, {absl::StrCat(i)}), ") ",
                      ZshOffer(command->positionals[i]), " ;;\n");
    }
  }
  return absl::StrCat(kZshPrologue, descend, skip_values, kZshAfterOptions, ZshValues(values), "  esac\n",
                      "  if [[ $PREFIX == -* ]]; then\n    case \"$command\" in\n", options,
                      "    esac\n    _describe option candidates\n    return\n  fi\n",
                      "  case \"$command:$positional\" in\n", positionals, kEpilogue);
}

}  // namespace lossd::tools
