#!/usr/bin/env bash
# Every check of the project, or some of them: sets up, builds what a suite needs, runs it, and sums up.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/tools/common.sh"
cd "$repo_root"

functional=(lint unit conformance integration python deploy)
more=(bench hosts asan tsan fuzz tidy attack)

usage() {
  cat <<END
usage: ./check.sh [--no-setup] [--cuda] [all | quick] [SUITE...]

Installs what is missing, builds what the suites need, runs them and sums up: as a table, and as build/check.json with the slowest
tests of each. Without suites it runs every functional one; 'all' adds what takes longer and is run before code is handed on:
sanitizers, fuzzers and clang-tidy. Logs are left in build/logs/. CUDA code is compiled where there is a CUDA toolkit; whether it was is
said in the end.
Each suite has a budget (tests/budgets.json), and fails where it takes a quarter more processor time than that.

  lint         layout (clang-format), include rules, file sizes and forbidden text, shell scripts
  unit         tests of single parts
  conformance  heads on the CPU against the fp64 reference, and on ranks against the CPU (those on a GPU: in the suite gpu)
  integration  the server, the clients and the tools together, over real gRPC
  deploy       rules, dashboards and consoles of deploy/, with promtool and against a real Prometheus; manifests for Kubernetes
  python       the package in client/python: its types, its style and its tests, in build/venv (tools/python_env.sh)
with 'all', or by name:
  bench        builds the benchmarks and runs each at a small size: results are checked, times are not
  attack       hostile clients and a network that fails, for a bounded time: memory stays within bounds, every bit is right
  hosts        a group over four hosts, with a slow network that loses packets and is cut: they are network namespaces, so this takes
               root and /dev/net/tun
  asan         the tests of quick, without those of lossctl, lossd-perf and train_lm, under AddressSanitizer and
               UndefinedBehaviorSanitizer
  tsan         the tests of the server's concurrent parts under ThreadSanitizer
  fuzz         parsers of bytes from outside, each over its corpus and some seconds of mutations (longer: tools/fuzz.sh)
  tidy         clang-tidy over every source file (those unchanged since they last passed are skipped)
by name alone:
  quick        what finds most mistakes in three minutes: lint, unit, the client library and the CPU device
  model        the models of the protocol, searched whole: unit does so by itself where the last commits have changed them
  nightly      what takes too long for every commit: every trainer, full matrices, long soaks, 5,000 simulated schedules
  gpu          the tests that need an NVIDIA GPU, the small ones under compute-sanitizer as well

How to run one test, and how long everything takes: CONTRIBUTING.md.

  --no-setup   leave the installed packages as they are
  --part K/N   of nightly, the K-th of N parts (K = 1 to N)
  --cuda       bring a CUDA toolkit first, without a GPU too (tools/cuda_toolkit.sh: 0.7 GB to download, no root)
  --gpu        the same as the suite gpu
Exit status: 0 if everything that ran passed, 1 if not, 2 for arguments that it does not know, and if another one runs in this clone.
END
}

setup=yes cuda=no part=1/1
suites=()
while (($#)); do
  argument=$1
  shift
  case $argument in
    -h | --help) usage && exit ;;
    --part)
      if [[ ! ${1:-} =~ ^([1-9][0-9]?)/([1-9][0-9]?)$ ]] || ((BASH_REMATCH[1] > BASH_REMATCH[2])); then
        printf -- '--part takes a part and the number of parts, such as 3/7\n\n' >&2
        usage >&2
        exit 2
      fi
      part=$1
      shift
      ;;
    --no-setup) setup=no ;;
    --cuda) cuda=yes ;;
    --gpu) suites+=(gpu) ;;
    all) suites+=("${functional[@]}" "${more[@]}") ;;
    quick) suites+=(lint quick) ;;
    *)
      if [[ " ${functional[*]} ${more[*]} quick model nightly gpu " != *" $argument "* ]]; then
        printf 'unknown suite: %s\n\n' "$argument" >&2
        usage >&2
        exit 2
      fi
      suites+=("$argument")
      ;;
  esac
done
if ((${#suites[@]} == 0)); then suites=("${functional[@]}"); fi
# wants SUITE...: whether one of them is to run.
wants() {
  local suite
  for suite; do
    if [[ " ${suites[*]} " == *" $suite "* ]]; then return; fi
  done
  return 1
}
named=("${suites[@]}") suites=()
for suite in "${named[@]}"; do wants "$suite" || suites+=("$suite"); done

# Suites of all test programs, and those for which Python's environment is made.
of_programs=(unit conformance integration deploy attack hosts gpu model nightly)
of_python=(python hosts gpu nightly)
jobs=$(nproc)
began=$SECONDS
evidence=()  # of the suite that runs, as tools/check_report.py takes it

# check LOG TITLE COMMAND...: one check that is not a test of CTest or pytest.
check() {
  local check_began=$SECONDS verdict=ok
  try_step "$@" || verdict=failed
  evidence+=(--check "$2" $((SECONDS - check_began)) "$verdict")
}

# What could not even begin.
give_up() { evidence+=(--check "$1" 0 failed); }

# build_tree PRESET TREE [TARGET...]: configures and builds a tree.
build_tree() {
  local preset=$1 tree=$2
  shift 2
  if ! try_step "$log_dir/configure-$preset.log" "Configuring $tree" configure_preset "$preset" ||
    ! try_step "$log_dir/build-$preset.log" "Building $tree" build_targets "$tree" "$@"; then
    give_up "building $tree"
    return 1
  fi
}

# The tree that every suite but lint, the sanitizers and clang-tidy runs. What Python's tests want comes first: they run while the
# others' programs are built.
suite_build() {
  local users=(lossd_c lossd) targets=() began=$SECONDS
  build_tree release build "${users[@]}" || return 0
  touch "$log_dir/build.users"
  if wants quick; then targets=(lossctl lossd_core_tests); fi
  if wants "${of_programs[@]}"; then targets=(all); fi
  if ((${#targets[@]})) && ! try_step "$log_dir/build-tests.log" "Building tests" build_targets build "${targets[@]}"; then
    give_up "building tests"
    return 0
  fi
  touch "$log_dir/build.made"
  if [[ $cuda == yes && $(cuda_status) != toolkit* ]]; then give_up "compiling CUDA code, which --cuda asks for"; fi
  evidence+=(--check "Building what users run and its tests" $((SECONDS - began)) ok)
}
# is_built [users]: all of it, or what users run.
is_built() { [[ -e $log_dir/build.${1:-made} ]]; }
needs_build() {
  if ! is_built "$@"; then give_up "building it"; fi
  is_built "$@"
}
# Until there is what the suite wants, or will not be.
await_build() {
  local wanted=made
  if [[ $1 == python ]]; then wanted=users; fi
  while ! is_built "$wanted" && kill -0 "$build_process" 2>/dev/null; do sleep 0.2; done
}

# run_ctest SUITE TREE CTEST_ARGUMENT...: shows each test as it ends.
run_ctest() {
  local report=$log_dir/check-$1.xml tests=$log_dir/check-$1.tests tree=$2
  rm -f "$report"
  evidence+=(--ctest "$report" "$tests")
  ctest --test-dir "$tree" --show-only=json-v1 "${@:3}" >"$tests"
  say "Running the tests of $tree: ${*:3}"
  ctest --test-dir "$tree" --output-on-failure --no-tests=error --output-junit "$report" "${@:3}" 2>&1 |
    tee "$log_dir/check-$1.log" | sed 's/^/    /' || tests_ended "CTest" "${PIPESTATUS[0]}" 8
}

# tests_ended TOOL STATUS FAILED: with another status than that for tests that failed, which the report has, it did not end as it should.
tests_ended() {
  if (($2 != 0 && $2 != $3)); then give_up "$1, which ended with status $2"; fi
}

suite_lint() {
  mapfile -t cxx < <(tools/source_files.py .h .c .cc .cu .cuh)
  mapfile -t shell < <(tools/source_files.py .sh .ci/run .ci/in_bare_root)
  check "$log_dir/check-format.log" "Layout of ${#cxx[@]} C, C++ and CUDA files" clang-format-14 --dry-run -Werror "${cxx[@]}"
  check "$log_dir/check-includes.log" "Include rules" tools/check_includes.py
  check "$log_dir/check-text.log" "File sizes and forbidden text" tools/check_text.py
  check "$log_dir/check-shell.log" "Shell scripts" shellcheck -x "${shell[@]}"
}

labelled_suite() {
  needs_build || return 0
  run_ctest "$1" build -L "^$1\$" -j "$2" "${@:3}"
}
# Every test belongs to one of the suites at least, or nobody would notice that it never runs.
check_labels() {
  local all labelled
  all=$(ctest --test-dir build -N | sed -n 's/^Total Tests: //p')
  labelled=$(ctest --test-dir build -N -L '^(unit|conformance|integration|bench|deploy|gpu|attack|hosts|model|nightly)$' | sed -n 's/^Total Tests: //p')
  if [[ -z $all || $all != "$labelled" ]]; then
    printf '%s tests, but only %s of them are labelled with a suite\n' "$all" "$labelled" >&2
    return 1
  fi
}

# Tests of `unit`, `quick` and `integration` wait for half of their time.
suite_unit() {
  labelled_suite unit $((2 * jobs))
  if is_built; then check "$log_dir/check-labels.log" "Every test is in a suite" check_labels; fi
}
suite_conformance() { labelled_suite conformance "$jobs"; }
suite_integration() { labelled_suite integration $((2 * jobs)); }
# No suite but this one, and the one on a GPU, builds the benchmarks.
build_benchmarks() { check "$log_dir/build-benchmarks.log" "Building the benchmarks" build_targets build lossd_benchmarks; }
suite_bench() {
  needs_build || return 0
  build_benchmarks
  labelled_suite bench 1
}
suite_attack() { labelled_suite attack 1; }
suite_hosts() {
  await_environment python_env || return 0  # torchrun
  labelled_suite hosts 1
}

# What finds most mistakes.
suite_quick() {
  needs_build || return 0
  run_ctest quick build -L '^core$' -j $((2 * jobs))
}
suite_model() { labelled_suite model 1; }
suite_nightly() {
  await_environment python_env || return 0
  labelled_suite nightly 1 -I "${part%/*},,${part#*/}"
  python_tests nightly -m nightly "--part=$part" -vv  # says at once what failed: .ci/in_bare_root
}

suite_deploy() {
  await_environment deploy_tools || return 0
  labelled_suite deploy $((2 * jobs))
}

# Python as the tests of the package want it: with what build/ has. The limit is a guard against hangs.
in_venv() {
  env -C client/python OMP_NUM_THREADS=1 PYTHONPATH="$repo_root/client/python" LOSSD_BINARY="$repo_root/build/bin/lossd" \
    LOSSD_LIBRARY="$repo_root/build/lib/liblossd_c.so" timeout 3600 "$repo_root/build/venv/bin/python" "$@"
}

# run_pytest SUITE PYTEST_ARGUMENT...
run_pytest() {
  local report=$log_dir/check-$1-python.xml log=$log_dir/check-$1-python.log
  rm -f "$report"
  evidence+=(--pytest "$report" "$log")
  say "Running the tests of client/python"
  in_venv -m pytest -q --dist=loadfile --junitxml="$report" "${@:2}" 2>&1 | tee "$log" | sed 's/^/    /' ||
    tests_ended pytest "${PIPESTATUS[0]}" 1
}

# python_tests SUITE PYTEST_ARGUMENT...: two processes, each with a server of its own: more would be in each other's way.
# A test that ends its process runs once more, in a new one.
python_tests() {
  local without=()
  if ! nvidia-smi -L >/dev/null 2>&1; then without=(--ignore-glob='*/test_cuda*.py'); fi
  run_pytest "$1" -n 2 --max-worker-restart=1 "${without[@]}" "${@:2}"
}

suite_python() {
  local venv=$repo_root/build/venv
  await_environment python_env || return 0
  needs_build users || return 0
  check "$log_dir/check-ruff.log" "Style of the Python package" "$venv/bin/ruff" check client/python bench
  check "$log_dir/check-ruff-format.log" "Layout of the Python package" "$venv/bin/ruff" format --check client/python bench
  check "$log_dir/check-mypy.log" "Types of the Python package" env -C client/python "$venv/bin/mypy"
  python_tests python -m "not nightly"
}

suite_asan() {
  build_tree asan build-asan lossd_core_tests || return 0
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1
  export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  export LSAN_OPTIONS=suppressions=$repo_root/tests/lsan.supp:print_suppressions=0
  run_ctest asan build-asan -L '^core$' -j "$jobs"
  unset ASAN_OPTIONS UBSAN_OPTIONS LSAN_OPTIONS
}

# One OpenMP thread: the distribution's OpenMP run time is not instrumented, so its barriers would look like races.
suite_tsan() {
  build_tree tsan build-tsan lossd_tsan_tests || return 0
  export OMP_NUM_THREADS=1
  export TSAN_OPTIONS=suppressions=$repo_root/tests/tsan.supp:ignore_noninstrumented_modules=1:second_deadlock_stack=1:exitcode=66
  run_ctest tsan build-tsan -L '^tsan$' -j "$jobs"
  unset OMP_NUM_THREADS TSAN_OPTIONS
}

# The mutations are the same each time: what is found by chance is found by tools/fuzz.sh.
suite_fuzz() {
  build_tree fuzz build-fuzz || return 0
  run_ctest fuzz build-fuzz -L '^fuzz$' -j "$jobs"
}

# A tree that is configured, of which nothing but the messages' headers is made.
suite_tidy() {
  await_environment tidy_env || return 0
  build_tree tidy build-tidy lossd_proto_sources || return 0
  check "$log_dir/check-tidy.log" "clang-tidy" tools/tidy.py --build build-tidy --jobs "$jobs"
}

suite_gpu() {
  if ! nvidia-smi -L >/dev/null 2>&1 && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    printf 'there is no NVIDIA GPU on this machine, and the suite gpu runs on nothing else\n' >&2
    give_up "finding a GPU"
    return
  fi
  needs_build || return 0
  if [[ $(cuda_status) != toolkit* ]]; then
    printf 'the CUDA code was not compiled (%s), so there is nothing to run on the GPU\n' "$(cuda_status)" >&2
    give_up "compiling CUDA code"
    return
  fi
  build_benchmarks
  run_ctest gpu build -L '^gpu$' -j 1
  local status=0 sanitizer_began=$SECONDS
  try_step "$log_dir/check-sanitizer.log" "compute-sanitizer over the small tests" \
    deploy/gpu_check.sh --out "$log_dir/gpu" --bin build/bin --no-tests || status=$?
  case $status in
    0) evidence+=(--check compute-sanitizer $((SECONDS - sanitizer_began)) ok) ;;
    77) say "left out: there is no compute-sanitizer" ;;
    *) evidence+=(--check compute-sanitizer $((SECONDS - sanitizer_began)) failed) ;;
  esac
  gpu_python
}

# The package with CUDA tensors.
gpu_python() {
  await_environment python_env || return 0
  local tests
  mapfile -t tests < <(cd client/python && find tests -name 'test_cuda*.py' | sort)
  run_pytest gpu "${tests[@]}"
  check "$log_dir/check-gpu-staging.log" "Batches of CUDA tensors (client/python/tests/cuda_check.py)" in_venv tests/cuda_check.py
  if (($(nvidia-smi -L 2>/dev/null | wc -l) > 1)); then
    check "$log_dir/check-gpu-devices.log" "Heads over two GPUs (client/python/tests/devices_check.py)" in_venv tests/devices_check.py
  fi
}

# What CMake decided about CUDA code, if it was asked.
cuda_status() { sed -n 's/^LOSSD_CUDA_STATUS:INTERNAL=//p' build/CMakeCache.txt 2>/dev/null || true; }

# What is downloaded for some suites is made while others are built. begin_environment NAME: by tools/NAME.sh
declare -A environments=()
begin_environment() {
  rm -f "$log_dir/$1.made"
  { "tools/$1.sh" >"$log_dir/$1.log" 2>&1 </dev/null && touch "$log_dir/$1.made"; } &
  environments[$1]=$!
}
# The suite that waits may be another process than the one that began, which `wait` does not allow.
await_environment() {
  if [[ -z ${environments[$1]:-} ]]; then return; fi
  while [[ ! -e $log_dir/$1.made ]] && kill -0 "${environments[$1]}" 2>/dev/null; do sleep 0.2; done
  if [[ -e $log_dir/$1.made ]]; then return; fi
  show_tail "$log_dir/$1.log"
  give_up "tools/$1.sh"
  return 1
}

# Two at a time would build one tree, and write one folder of logs. What this one starts holds the lock as well, until it has ended.
mkdir -p "$log_dir"
exec {lock}<"$log_dir"
if ! flock --nonblock "$lock"; then
  printf 'another ./check.sh runs in this clone; wait for it, or take a clone of your own\n' >&2
  exit 2
fi

# What runs beside ends with this script.
trap 'end_tree $$' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

groups=(build run test)
if wants deploy; then groups+=(deploy); fi
if wants "${of_python[@]}"; then groups+=(python); fi
if wants fuzz; then groups+=(fuzz); fi
if [[ $cuda == yes ]]; then groups+=(cuda); fi
if [[ $setup == yes ]]; then
  tools/setup.sh "${groups[@]}"
elif [[ $cuda == yes ]]; then
  tools/cuda_toolkit.sh --always
fi
rm -f "$log_dir"/build.{users,made}
# The search of the models takes minutes and asks nothing but their files.
if wants unit && ! wants model nightly && [[ -n $(tools/source_files.py --recent .pml tests/model/run_model.py) ]]; then suites+=(model); fi
if wants "${of_python[@]}"; then begin_environment python_env; fi
if wants deploy; then begin_environment deploy_tools; fi
if wants tidy; then begin_environment tidy_env; fi

# run_suite NAME: leaves what it has shown in build/logs/check-NAME.json. A process of its own, whose children's time is the suite's.
run_suite() (
  suite_began=$SECONDS
  evidence=()
  "suite_$1"
  times >"$log_dir/check-$1.times"
  tools/check_report.py suite "$log_dir/check-$1.json" "$1" $((SECONDS - suite_began)) "$log_dir/check-$1.times" \
    "$log_dir/check.speeds" "${evidence[@]}"
)

tools/check_report.py watch "$log_dir/check.speeds" $$ {lock}<&- &

# What has passed and has not changed since: tests/test_main.cc.
export LOSSD_UNCHANGED=pass
if wants python bench quick "${of_programs[@]}"; then suites=(build "${suites[@]}"); fi
reports=("${suites[@]/#/$log_dir/check-}")
reports=("${reports[@]/%/.json}")
rm -f "${reports[@]}"

# These run beside the others, one after another, since they wait for half of their time. Python's begin first. What `quick` runs as well
# runs in turn.
beside=() in_turn=()
for suite in "${suites[@]}"; do
  case $suite in
    python) beside=("$suite" "${beside[@]}") ;;
    deploy | hosts) beside+=("$suite") ;;
    conformance) if wants quick; then in_turn+=("$suite"); else beside+=("$suite"); fi ;;
    *) in_turn+=("$suite") ;;
  esac
done
if ((${#in_turn[@]} < 2)); then in_turn=("${suites[@]}") beside=(); fi

run_beside() {
  local suite
  for suite in "${beside[@]}"; do
    await_build "$suite"
    run_suite "$suite" >"$log_dir/check-$suite.out" 2>&1 </dev/null &
    wait "$!" || true
  done
}
# show_beside [all]: what those of them have printed that ended since, or all of them.
show_beside() {
  while ((${#beside[@]})) && [[ -n ${1:-} || -e $log_dir/check-${beside[0]}.json ]]; do
    printf '\n=== %s, which ran beside the others\n' "${beside[0]}"
    cat "$log_dir/check-${beside[0]}.out" || true
    beside=("${beside[@]:1}")
  done
}

build_process='' beside_process=''
begin_beside() {
  say "beside the others run: ${beside[*]}; their logs are build/logs/check-*.out"
  run_beside &
  beside_process=$!
}
await_beside() { if [[ -n $beside_process ]]; then wait "$beside_process" || true; fi; }
for suite in "${in_turn[@]}"; do
  # A flood is none where other suites have the processors.
  if [[ $suite == attack ]]; then await_beside; fi
  printf '\n=== %s\n' "$suite"
  run_suite "$suite" </dev/null &
  in_turn_process=$!
  if [[ $suite == build ]]; then build_process=$in_turn_process; fi
  if [[ $suite == build ]] && ((${#beside[@]})); then begin_beside; fi
  wait "$in_turn_process" || true
  show_beside
done
await_beside
show_beside all

if is_built; then
  case $(cuda_status) in
    toolkit*) printf '\nCUDA code was compiled: %s\n' "$(cuda_status)" ;;
    *) printf '\nCUDA code was NOT compiled (%s); ./check.sh --cuda brings a toolkit\n' "$(cuda_status)" ;;
  esac
fi
tools/check_report.py table build/check.json $((SECONDS - began)) tests/budgets.json "${reports[@]}"
