#!/usr/bin/env bash
# deploy/gpu_check.sh counts what ran, without a GPU: nvidia-smi, the test programs and compute-sanitizer are stand-ins.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

stand_in() {
  printf '#!/bin/sh\n%s\n' "$2" >"$1"
  chmod +x "$1"
}
# expect STATUS TEXT ARGUMENT...: gpu_check.sh ends with STATUS and its summary has TEXT.
expect() {
  local status=0 text=$2 wanted=$1
  shift 2
  rm -rf "$scratch/out"
  PATH=$scratch/path:$PATH CUDA_HOME=$scratch "$root/deploy/gpu_check.sh" --out "$scratch/out" --bin "$scratch/bin" "$@" \
    >"$scratch/printed" 2>&1 || status=$?
  if [[ $status != "$wanted" ]] || ! grep -qs -- "$text" "$scratch/out/summary.txt" "$scratch/printed"; then
    printf 'expected status %s and "%s", got status %s and:\n' "$wanted" "$text" "$status"
    cat "$scratch/printed"
    failures=$((failures + 1))
  fi
}

mkdir "$scratch/bin" "$scratch/path"
stand_in "$scratch/path/nvidia-smi" 'echo "GPU 0: stand-in"'
expect 1 'no cuda_\*_test in'

stand_in "$scratch/bin/cuda_step_test" 'echo "[       OK ] Step.Small (1 ms)"; echo "$@"'
expect 0 '^1 passed, 0 failed' --no-sanitizer
grep -q "gtest_output=xml:$scratch/out/cuda_step_test.xml" "$scratch/out/cuda_step_test.txt" || failures=$((failures + 1))

# The sanitizer runs the small tests with each of its tools.
# shellcheck disable=SC2016
stand_in "$scratch/path/compute-sanitizer" 'echo "tool $2"; shift 6; exec "$@"'
expect 0 '^4 passed, 0 failed'
expect 0 '^3 passed, 0 failed' --no-tests
grep -q 'gtest_filter=\*Small\*' "$scratch/out/sanitizer_racecheck.txt" || failures=$((failures + 1))
grep -q 'tool initcheck' "$scratch/out/sanitizer_initcheck.txt" || failures=$((failures + 1))

# What fails, crashes or runs nothing is counted, in the text and in the XML.
stand_in "$scratch/bin/cuda_broken_test" 'echo "[       OK ] A.B (1 ms)"; exit 1'
stand_in "$scratch/bin/cuda_empty_test" 'echo "[==========] 0 tests ran."'
stand_in "$scratch/path/compute-sanitizer" 'exit 99'
expect 1 '^1 passed, 5 failed'
grep -q 'tests="6" failures="5"' "$scratch/out/summary.xml" || failures=$((failures + 1))
grep -q 'cuda_empty_test.*not one test ran' "$scratch/out/summary.txt" || failures=$((failures + 1))

((failures == 0)) && echo "gpu_check.sh: all as expected"
