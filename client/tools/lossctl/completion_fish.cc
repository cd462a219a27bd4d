// The completion script for fish: one line for each candidate, with the condition under which it is offered.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/tools/lossctl/completion.h"

namespace lossd::tools {
namespace {

// __lossctl_at PATH [POSITION]: true if the words so far lead to that command (and to its argument of that
// number).
constexpr char kFishPrologue[] = R"sh(# fish completion for lossctl; made by 'lossctl completion fish'.
function __lossctl_connection
    set -l words (commandline -opc)
    for i in (seq (count $words))
        switch $words[$i]
            case --server --tls_ca --tls_certificate --tls_key --tls_server_name --token_file
                test $i -lt (count $words); and printf '%s\n' $words[$i] $words[(math $i + 1)]
            case '--server=*' '--tls_*=*' '--token_file=*' --token_over_plain_text '--token_over_plain_text=*'
                printf '%s\n' $words[$i]
        end
    end
end
function __lossctl_heads
    lossctl __heads (__lossctl_connection) 2>/dev/null
end
function __lossctl_at
    set -l command lossctl
    set -l positional 0
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip -eq 1
            set skip 0
            continue
        end
        switch "$command:$word"
)sh";

constexpr char kFishAfterOptions[] = R"sh(
                set skip 1
            case '*:-*'
            case '*'
                set positional (math $positional + 1)
        end
    end
    test "$command" = "$argv[1]"; and begin
        test (count $argv) -lt 2; or test "$positional" -eq "$argv[2]"
    end
end
complete -c lossctl -f
)sh";

std::string FishOffer(const CompletionValue& value) {
  switch (value.kind) {
    case ValueKind::kNothing:
      return " -x";
    case ValueKind::kChoice:
      return absl::StrCat(" -x -a ", ShellQuote(absl::StrJoin(value.choices, " ")));
    case ValueKind::kFile:
      return " -r -F";
    case ValueKind::kHead:
      return " -x -a '(__lossctl_heads)'";
  }
  return "";
}

std::string At(const std::string& path) {
  return absl::StrCat("complete -c lossctl -n '__lossctl_at \"", path, "\"'");
}
std::string At(const std::string& path, size_t position) {
  return absl::StrCat("complete -c lossctl -n '__lossctl_at \"", path, "\" ", position, "'");
}

// " -l json -s j"
std::string Names(const CompletionOption& option) {
  std::string text;
  for (const std::string& name : option.names) {
    absl::string_view bare = name;
    const bool is_long = absl::ConsumePrefix(&bare, "--");
    absl::ConsumePrefix(&bare, "-");
    absl::StrAppend(&text, is_long ? " -l " : " -s ", bare);
  }
  return text;
}

}  // namespace

std::string FishCompletion(const CompletionCommand& root) {
  std::string descend;
  std::string skip_values = "            case";
  std::string lines;
  for (const CompletionCommand* command : AllCommands(root)) {
    for (const CompletionOption& option : command->options) {
      absl::StrAppend(&lines, At(command->path), Names(option),
                      option.takes_value ? FishOffer(option.value) : "", " -d ",
                      ShellQuote(option.description), "\n");
      if (!option.takes_value) continue;
      for (const std::string& name : option.names) {
        absl::StrAppend(&skip_values, " ", ShellQuote(absl::StrCat(command->path, ":", name)));
      }
    }
    for (const CompletionCommand& subcommand : command->subcommands) {
      absl::StrAppend(&descend, "            case ",
                      ShellQuote(absl::StrCat(command->path, ":", subcommand.name)),
                      "\n                set command ", ShellQuote(subcommand.path),
                      "\n                set positional 0\n");
      absl::StrAppend(&lines, At(command->path, 0), " -a ", subcommand.name, " -d ",
                      ShellQuote(subcommand.description), "\n");
    }
    for (size_t i = 0; i < command->positionals.size(); ++i) {
      if (command->positionals[i].kind == ValueKind::kNothing) continue;
      absl::StrAppend(&lines, At(command->path, i), FishOffer(command->positionals[i]), "\n");
    }
  }
  return absl::StrCat(kFishPrologue, descend, skip_values, kFishAfterOptions, lines);
}

}  // namespace lossd::tools
