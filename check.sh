#!/usr/bin/env bash
# Every check of the project, or some of them: sets up, builds what a suite needs, runs it, and sums up.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/tools/common.sh"
cd "$repo_root"

default_suites=(lint unit conformance integration bench deploy python asan tsan tidy)
all_suites=("${default_suites[@]}" gpu)

usage() {
  cat <<END
usage: ./check.sh [--no-setup] [--cuda] [--gpu] [SUITE...]

Installs what is missing, builds what the suites need, runs them and sums up. Without suites: all but gpu. Logs are left in
build/logs/. CUDA code is compiled where there is a CUDA toolkit; whether it was is said in the end.

  lint         layout (clang-format), include rules, file sizes and forbidden text, shell scripts
  unit         tests of single parts
  conformance  heads on every device, against the fp64 reference (those on a GPU: in the suite gpu)
  integration  the server, the clients and the tools together, over real gRPC
  bench        the benchmark at a small size: its results are checked, its times are not
  deploy       rules, dashboards and consoles of deploy/, with promtool and against a real Prometheus; manifests for Kubernetes
  python       the package in client/python: its types, its style and its tests, in build/venv (tools/python_env.sh)
  asan         unit, conformance and integration under AddressSanitizer and UndefinedBehaviorSanitizer
  tsan         the tests of the server's concurrent parts under ThreadSanitizer
  tidy         clang-tidy over every source file (those unchanged since they last passed are skipped)
  gpu          the tests that need an NVIDIA GPU, the small ones under compute-sanitizer as well

One test by name, after ./check.sh unit has built it: ctest --test-dir build -R NAME --output-on-failure

  --no-setup   leave the installed packages as they are
  --cuda       bring a CUDA toolkit first, without a GPU too (tools/cuda_toolkit.sh: 0.5 GB to download, no root)
  --gpu        the same as the suite gpu

CHECK_SECONDS=N in the environment: after N seconds in all, clang-tidy begins no further file, and says how many it left for the next time.
END
}

setup=yes cuda=no
suites=()
for argument in "$@"; do
  case $argument in
    -h | --help) usage && exit ;;
    --no-setup) setup=no ;;
    --cuda) cuda=yes ;;
    --gpu) suites+=(gpu) ;;
    *)
      if [[ " ${all_suites[*]} " != *" $argument "* ]]; then
        printf 'unknown suite: %s\n\n' "$argument" >&2
        usage >&2
        exit 2
      fi
      suites+=("$argument")
      ;;
  esac
done
if ((${#suites[@]} == 0)); then suites=("${default_suites[@]}"); fi

jobs=$(nproc)
began=$SECONDS
passed=0 failed=0 rows=() failures=()
suite_passed=0 suite_failed=0

count_pass() { suite_passed=$((suite_passed + $1)); }
count_fail() { suite_failed=$((suite_failed + $1)); }

# One check that is not a CTest test: counts as one.
check() {
  if try_step "$@"; then
    count_pass 1
  else
    count_fail 1
    failures+=("$2")
  fi
}

# A report that says what failed: its tests are named again in the end, where whoever looks finds them.
name_failures() {
  local suite=$1 report=$2 line
  while IFS= read -r line; do failures+=("$suite: $line"); done < <(tools/failed_tests.py "$report")
}

# Configures and builds a tree once a run. build_tree PRESET TREE [TARGET...]
declare -A built=()
build_tree() {
  local preset=$1 tree=$2
  shift 2
  if [[ -n ${built[$tree $*]:-} ]]; then return; fi
  try_step "$log_dir/configure-$preset.log" "Configuring $tree" configure_preset "$preset" || return 1
  try_step "$log_dir/build-$preset.log" "Building $tree" build_targets "$tree" "$@" || return 1
  built[$tree $*]=yes
}

# run_ctest SUITE TREE CTEST_ARGUMENT...: shows each test as it ends and counts them.
run_ctest() {
  local suite=$1 tree=$2 report total bad
  shift 2
  report=$log_dir/check-$suite.xml
  rm -f "$report"
  say "Running the tests of $tree: $*"
  ctest --test-dir "$tree" --output-on-failure --no-tests=error --output-junit "$report" "$@" 2>&1 |
    tee "$log_dir/check-$suite.log" | sed 's/^/    /' || true
  if [[ ! -s $report ]]; then
    count_fail 1
    return
  fi
  total=$(report_count tests "$report")
  # A test that did not run, for want of its program or by its own choice, has shown nothing: it counts as failed.
  bad=$(($(report_count failures "$report") + $(report_count skipped "$report") + $(report_count disabled "$report")))
  count_fail "$bad"
  count_pass $((total - bad))
  if ((bad)); then name_failures "$suite" "$report"; fi
}
report_count() { sed -n "0,/[^a-z]$1=\"/s/.*[^a-z]$1=\"\([0-9]*\)\".*/\1/p" "$2" | head -n 1; }

suite_lint() {
  mapfile -t cxx < <(tools/source_files.py .h .c .cc .cu .cuh)
  mapfile -t shell < <(tools/source_files.py .sh .ci/run)
  check "$log_dir/check-format.log" "Layout of ${#cxx[@]} C, C++ and CUDA files" clang-format-14 --dry-run -Werror "${cxx[@]}"
  check "$log_dir/check-includes.log" "Include rules" tools/check_includes.py
  check "$log_dir/check-text.log" "File sizes and forbidden text" tools/check_text.py
  check "$log_dir/check-shell.log" "Shell scripts" shellcheck -x "${shell[@]}"
}

labelled_suite() {
  build_tree release build || { count_fail 1 && return; }
  run_ctest "$1" build -L "^$1\$" -j "$2"
}
suite_unit() { labelled_suite unit "$jobs"; }
suite_conformance() { labelled_suite conformance 1; }
suite_integration() { labelled_suite integration "$jobs"; }
suite_bench() { labelled_suite bench 1; }

suite_deploy() {
  if [[ $setup == yes ]]; then tools/setup.sh deploy; fi
  tools/deploy_tools.sh || { count_fail 1 && return; }
  labelled_suite deploy 1
}

# Python as the tests of the package want it: with what build/ has.
in_venv() {
  env -C client/python OMP_NUM_THREADS=1 PYTHONPATH="$repo_root/client/python" LOSSD_SERVER="$repo_root/build/bin/lossd" \
    LOSSD_LIBRARY="$repo_root/build/lib/liblossd_c.so" "$repo_root/build/venv/bin/python" "$@"
}

# run_pytest SUITE PYTEST_ARGUMENT...: counts the tests; one that was skipped has shown nothing, so it counts as failed.
run_pytest() {
  local suite=$1 report=$log_dir/check-$1-python.xml total bad
  shift
  rm -f "$report"
  say "Running the tests of client/python"
  in_venv -m pytest -q --junitxml="$report" "$@" 2>&1 | tee "$log_dir/check-$suite-python.log" | sed 's/^/    /' || true
  if [[ ! -s $report ]]; then
    count_fail 1
    return
  fi
  total=$(report_count tests "$report")
  bad=$(($(report_count failures "$report") + $(report_count errors "$report") + $(report_count skipped "$report")))
  count_fail "$bad"
  count_pass $((total - bad))
  if ((bad)); then name_failures "$suite" "$report"; fi
}

# Two processes, each with a server of its own: more would be in each other's way.
suite_python() {
  local venv=$repo_root/build/venv without=()
  if [[ $setup == yes ]]; then tools/setup.sh python; fi
  tools/python_env.sh || { count_fail 1 && return; }
  build_tree release build lossd_c lossd || { count_fail 1 && return; }
  check "$log_dir/check-ruff.log" "Style of the Python package" "$venv/bin/ruff" check client/python
  check "$log_dir/check-ruff-format.log" "Layout of the Python package" "$venv/bin/ruff" format --check client/python
  check "$log_dir/check-mypy.log" "Types of the Python package" env -C client/python "$venv/bin/mypy"
  if ! nvidia-smi -L >/dev/null 2>&1; then without=(--ignore-glob='*/test_cuda*.py'); fi
  run_pytest python -n 2 "${without[@]}"
}

suite_asan() {
  build_tree asan build-asan || { count_fail 1 && return; }
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1
  export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  export LSAN_OPTIONS=suppressions=$repo_root/tests/lsan.supp:print_suppressions=0
  run_ctest asan build-asan -L '^(unit|conformance|integration)$' -j "$jobs"
  unset ASAN_OPTIONS UBSAN_OPTIONS LSAN_OPTIONS
}

# One OpenMP thread: the distribution's OpenMP run time is not instrumented, so its barriers would look like races.
suite_tsan() {
  try_step "$log_dir/configure-tsan.log" "Configuring build-tsan" configure_preset tsan || { count_fail 1 && return; }
  mapfile -t targets < <(ctest --test-dir build-tsan -N -L '^tsan$' | sed -n 's/^ *Test *#[0-9]*: //p')
  if ((${#targets[@]} == 0)); then
    printf '    no test is labelled tsan\n'
    count_fail 1
    return
  fi
  build_tree tsan build-tsan "${targets[@]}" || { count_fail 1 && return; }
  export OMP_NUM_THREADS=1
  export TSAN_OPTIONS=suppressions=$repo_root/tests/tsan.supp:ignore_noninstrumented_modules=1:second_deadlock_stack=1:exitcode=66
  run_ctest tsan build-tsan -L '^tsan$' -j "$jobs"
  unset OMP_NUM_THREADS TSAN_OPTIONS
}

suite_tidy() {
  tools/tidy_env.sh || { count_fail 1 && return; }
  try_step "$log_dir/configure-release.log" "Configuring build" configure_preset release || { count_fail 1 && return; }
  try_step "$log_dir/build-proto.log" "Generating the messages" build_targets build lossd_proto || { count_fail 1 && return; }
  local limit=()
  if [[ -n ${CHECK_SECONDS:-} ]]; then
    local rest=$((CHECK_SECONDS - (SECONDS - began)))
    limit=(--seconds $((rest > 120 ? rest : 120)))
  fi
  check "$log_dir/check-tidy.log" "clang-tidy" tools/tidy.py --build build --jobs "$jobs" "${limit[@]}"
  sed -n '/not looked at/s/^/    /p' "$log_dir/check-tidy.log"
}

suite_gpu() {
  if ! nvidia-smi -L >/dev/null 2>&1 && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    printf 'there is no NVIDIA GPU on this machine, and the suite gpu runs on nothing else\n' >&2
    count_fail 1
    return
  fi
  build_tree release build || { count_fail 1 && return; }
  if [[ $(cuda_status) != toolkit* ]]; then
    printf 'the CUDA code was not compiled (%s), so there is nothing to run on the GPU\n' "$(cuda_status)" >&2
    count_fail 1
    return
  fi
  run_ctest gpu build -L '^gpu$' -j 1
  local status=0
  try_step "$log_dir/check-sanitizer.log" "compute-sanitizer over the small tests" \
    deploy/gpu_check.sh --out "$log_dir/gpu" --bin build/bin --no-tests || status=$?
  case $status in
    0) count_pass 1 ;;
    77) say "left out: there is no compute-sanitizer" ;;
    *) count_fail 1 ;;
  esac
  gpu_python
}

# The package with CUDA tensors.
gpu_python() {
  if [[ $setup == yes ]]; then tools/setup.sh python; fi
  tools/python_env.sh || { count_fail 1 && return; }
  local tests
  mapfile -t tests < <(cd client/python && find tests -name 'test_cuda*.py' | sort)
  run_pytest gpu "${tests[@]}"
  check "$log_dir/check-gpu-staging.log" "Batches of CUDA tensors (client/python/tests/cuda_check.py)" in_venv tests/cuda_check.py
}

# What CMake decided about CUDA code, if it was asked.
cuda_status() { sed -n 's/^LOSSD_CUDA_STATUS:INTERNAL=//p' build/CMakeCache.txt 2>/dev/null || true; }

# Every test belongs to exactly one of the suites, or nobody would notice that it never runs.
check_labels() {
  local all labelled
  all=$(ctest --test-dir build -N | sed -n 's/^Total Tests: //p')
  labelled=$(ctest --test-dir build -N -L '^(unit|conformance|integration|bench|deploy|gpu)$' | sed -n 's/^Total Tests: //p')
  if [[ $all != "$labelled" ]]; then
    printf '%s tests, but only %s of them are labelled unit, conformance, integration, bench, deploy or gpu\n' "$all" "$labelled" >&2
    return 1
  fi
}

if [[ $setup == yes ]]; then tools/setup.sh build run test; fi
if [[ $cuda == yes ]]; then
  if [[ $setup == yes ]]; then tools/setup.sh cuda; else tools/cuda_toolkit.sh --always; fi
fi
mkdir -p "$log_dir"

for suite in "${suites[@]}"; do
  printf '\n=== %s\n' "$suite"
  suite_began=$SECONDS suite_passed=0 suite_failed=0
  "suite_$suite"
  if ((suite_failed == 0 && suite_passed == 0)); then suite_failed=1; fi
  verdict=ok
  if ((suite_failed)); then verdict=FAILED; fi
  rows+=("$(printf '%-12s %-7s %6d %7d %7d s' "$suite" "$verdict" "$suite_passed" "$suite_failed" $((SECONDS - suite_began)))")
  passed=$((passed + suite_passed)) failed=$((failed + suite_failed))
done
if [[ -n ${built["build "]:-} ]] && ! check_labels; then failed=$((failed + 1)); fi

printf '\n%-12s %-7s %6s %7s %9s\n' suite result passed failed time
printf '%s\n' "${rows[@]}"
if ((${#failures[@]})); then
  printf '\ndid not pass:\n'
  printf '  %s\n' "${failures[@]}"
fi
if [[ -n ${built["build "]:-} ]]; then
  case $(cuda_status) in
    toolkit*) printf '\nCUDA code was compiled: %s\n' "$(cuda_status)" ;;
    *) printf '\nCUDA code was NOT compiled (%s); ./check.sh --cuda brings a toolkit\n' "$(cuda_status)" ;;
  esac
fi
printf '\n%d s in all; logs are in build/logs/\n' $((SECONDS - began))
printf '%d passed, %d failed\n' "$passed" "$failed"
((failed == 0))
