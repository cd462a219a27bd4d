#!/usr/bin/env bash
# Runs the tests that need a GPU, and the small ones of them once more under compute-sanitizer. Works in an unpacked bundle, where
# deploy/bundle.sh --tests puts it, and in the source tree after a build; needs bash and the programs, nothing else.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<END
usage: gpu_check.sh --out FOLDER [--bin FOLDER] [--no-tests | --no-sanitizer]

Runs every cuda_*_test, then cuda_step_test's tests named *Small* under compute-sanitizer's memcheck, racecheck and initcheck if
that is in PATH, in the bundle, in \$CUDA_HOME, in /usr/local/cuda or in build/cuda-toolkit. The exit status is 0 if all passed,
77 if there was nothing to run.

  --out FOLDER    gets summary.txt, summary.xml (JUnit), device.txt, and for each step STEP.txt; for each test program also
                  PROGRAM.xml (JUnit, every test)
  --bin FOLDER    where the test programs are; default: bin/ of the bundle, or build/bin/ of the source tree
  --no-tests      only compute-sanitizer
  --no-sanitizer  only the tests
END
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

out='' bin='' tests=yes sanitizer=yes
while (($#)); do
  case $1 in
    --out) out=${2:-} && shift ;;
    --bin) bin=${2:-} && shift ;;
    --no-tests) tests=no ;;
    --no-sanitizer) sanitizer=no ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift || break
done
[[ -n $out ]] || { usage >&2 && exit 2; }
if [[ -z $bin ]]; then bin=$here/bin; fi
if [[ ! -d $bin ]]; then bin=$here/../build/bin; fi

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU' || compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
has_gpu || fail "there is no NVIDIA GPU on this machine, and these tests run on nothing else"
programs=("$bin"/cuda_*_test)
[[ -x ${programs[0]} ]] || fail "no cuda_*_test in $bin: they are built where CMake finds a CUDA toolkit"

mkdir -p "$out"
nvidia-smi >"$out/device.txt" 2>&1 || true
passed=0 failed=0 cases=''
: >"$out/summary.txt"

# step NAME COMMAND...: counts it as passed if the command succeeds and ran at least one test that was not skipped.
step() {
  local name=$1 log=$out/$1.txt began=$SECONDS status=0 verdict=passed ran=0 problem='' result=''
  shift
  timeout 1200 "$@" >"$log" 2>&1 || status=$?
  ran=$(grep -c '^\[       OK \]' "$log" || true)
  if ((status)); then
    problem="exit status $status"
  elif ((ran == 0)); then
    problem="not one test ran"
  fi
  if [[ -n $problem ]]; then
    verdict=FAILED failed=$((failed + 1))
    tail -n 30 "$log"
    result="<failure message=\"$problem\"/>"
  else
    passed=$((passed + 1))
  fi
  cases+="<testcase classname=\"gpu\" name=\"$name\" time=\"$((SECONDS - began))\">$result</testcase>"$'\n'
  printf '%-40s %-7s %4d tests %5d s  %s\n' "$name" "$verdict" "$ran" $((SECONDS - began)) "$problem" | tee -a "$out/summary.txt"
}

find_sanitizer() {
  local candidate
  for candidate in "$(command -v compute-sanitizer || true)" "$here/sanitizer/bin/compute-sanitizer" \
    "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" /usr/local/cuda/bin/compute-sanitizer \
    "$here/../build/cuda-toolkit/bin/compute-sanitizer"; do
    if [[ -x $candidate ]]; then printf '%s\n' "$candidate" && return; fi
  done
  return 1
}

if [[ $tests == yes ]]; then
  for program in "${programs[@]}"; do
    name=$(basename "$program")
    step "$name" "$program" "--gtest_output=xml:$out/$name.xml"
  done
fi
if [[ $sanitizer == yes ]]; then
  if ! compute_sanitizer=$(find_sanitizer); then
    printf 'no compute-sanitizer on this machine: memcheck, racecheck and initcheck are left out\n' | tee -a "$out/summary.txt"
  elif [[ ! -x $bin/cuda_step_test ]]; then
    printf 'no cuda_step_test in %s: compute-sanitizer has nothing to run\n' "$bin" | tee -a "$out/summary.txt"
    failed=$((failed + 1))
  else
    for tool in memcheck racecheck initcheck; do
      step "sanitizer_$tool" "$compute_sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 20 \
        "$bin/cuda_step_test" '--gtest_filter=*Small*'
    done
  fi
fi

{
  printf '<?xml version="1.0" encoding="UTF-8"?>\n'
  printf '<testsuite name="gpu" tests="%d" failures="%d">\n%s</testsuite>\n' $((passed + failed)) "$failed" "$cases"
} >"$out/summary.xml"
printf '%d passed, %d failed\n' "$passed" "$failed" | tee -a "$out/summary.txt"
if ((passed + failed == 0)); then exit 77; fi
((failed == 0))
