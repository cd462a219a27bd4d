#!/usr/bin/env bash
# Runs the fuzzers of tests/fuzz for as long as somebody wants them to; ./check.sh fuzz runs each for some seconds.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$repo_root"

usage() {
  cat <<END
usage: tools/fuzz.sh [--runs N] [--jobs N] [--keep] [PARSER...]

Builds the fuzzers (the tree build-fuzz; tools/setup.sh fuzz installs clang) and runs each of them, or those named, under
AddressSanitizer and UndefinedBehaviorSanitizer. They begin with tests/fuzz/corpus/PARSER and go on with what earlier runs left
in build-fuzz/corpus/PARSER. An input that breaks something is left in build-fuzz/found/, named after the parser, and tried
again by

    build-fuzz/bin/PARSER_fuzz FILE

  --runs N  executions of each (default: 1000000)
  --jobs N  fuzzers at a time (default: 2)
  --keep    afterwards add to tests/fuzz/corpus, smallest first, what reaches code that nothing in it reaches
Parsers: ${parsers[*]}
Exit status: 0 if nothing was found, 1 if something was, 2 for arguments that it does not know.
END
}

# The variables of what is instrumented are those of the tests in tests/fuzz/CMakeLists.txt.
export ASAN_OPTIONS=strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

# fuzz PARSER RUNS: its log is left in build/logs; says how it went.
fuzz() {
  local log=$log_dir/fuzz-$1.log seeds=tests/fuzz/corpus/$1 own=build-fuzz/corpus/$1 status=0
  mkdir -p "$own"
  "build-fuzz/bin/$1_fuzz" -runs="$2" -print_final_stats=1 -artifact_prefix="build-fuzz/found/$1-" "$own" "$seeds" \
    >"$log" 2>&1 </dev/null || status=$?
  local ran speed
  ran=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  speed=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
  printf '    %-20s %-6s %s executions, %s a second\n' "$1" "$( ((status)) && echo FAILED || echo ok)" "${ran:-?}" "${speed:-?}"
  if ((status)); then
    show_tail "$log" 30
    return 1
  fi
}

# Edges alone, not how often they are passed: few files show them all.
keep() {
  "build-fuzz/bin/$1_fuzz" -merge=1 -use_counters=0 "tests/fuzz/corpus/$1" "build-fuzz/corpus/$1" >"$log_dir/fuzz-keep-$1.log" 2>&1
}

mapfile -t parsers < <(find tests/fuzz -name '*_fuzz.cc' -printf '%f\n' | sed 's/_fuzz\.cc$//' | sort)
runs=1000000 jobs=2 keep=no
chosen=()
while (($#)); do
  case $1 in
    -h | --help) usage && exit ;;
    --runs) runs=${2:-} && shift ;;
    --jobs) jobs=${2:-} && shift ;;
    --keep) keep=yes ;;
    *) chosen+=("$1") ;;
  esac
  shift || true
done
if ((${#chosen[@]} == 0)); then chosen=("${parsers[@]}"); fi
for parser in "${chosen[@]}"; do
  if [[ " ${parsers[*]} " != *" $parser "* ]]; then usage >&2 && exit 2; fi
done
if [[ ! $runs =~ ^[1-9][0-9]*$ || ! $jobs =~ ^[1-9][0-9]*$ ]]; then usage >&2 && exit 2; fi

try_step "$log_dir/configure-fuzz.log" "Configuring build-fuzz" configure_preset fuzz ||
  fail "build-fuzz could not be configured" "tools/setup.sh fuzz installs what it needs"
try_step "$log_dir/build-fuzz.log" "Building build-fuzz" build_targets build-fuzz "${chosen[@]/%/_fuzz}" ||
  fail "the fuzzers could not be built"
mkdir -p build-fuzz/found

trap 'end_tree $$' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

say "Running ${#chosen[@]} fuzzers, $runs executions each"
failed=0
for parser in "${chosen[@]}"; do
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n || failed=1; done
  fuzz "$parser" "$runs" &
done
while (($(jobs -p | wc -l) > 0)); do wait -n || failed=1; done
if [[ $keep == yes ]]; then
  for parser in "${chosen[@]}"; do keep "$parser" || failed=1; done
  say "tests/fuzz/corpus has $(find tests/fuzz/corpus -type f | wc -l) files of $(find tests/fuzz/corpus -type f -printf '%s\n' | awk "{ sum += \$1 } END { print sum }") bytes"
fi
exit "$failed"
