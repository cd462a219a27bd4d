#!/usr/bin/env bash
# check.sh runs once at a time in a clone, and waits for nothing that has ended. A signal leaves nothing of check.sh, tools/fuzz.sh or
# quickstart.sh behind.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

expect() {  # expect WHAT ACTUAL WANTED
  if [[ $2 != "$3" ]]; then
    printf '%s is "%s", not "%s"\n' "$1" "$2" "$3"
    cat "$scratch"/output*
    failures=$((failures + 1))
  fi
}
program() {  # program FILE LINE...
  mkdir -p "$(dirname "$1")"
  printf '%s\n' '#!/bin/bash' "${@:2}" >"$1"
  chmod +x "$1"
}
await() { until [[ -s $1 ]]; do sleep 0.05; done; }
left_of() {  # left_of PID: "running" if it does not end within five seconds
  for _ in {1..100}; do
    if ! kill -0 "$1" 2>/dev/null; then return; fi
    sleep 0.05
  done
  kill -KILL "$1"
  echo running
}

# A clone whose set-up and fuzzer do nothing but wait.
mkdir -p "$scratch/clone/tools"
cd "$scratch/clone" || exit 1
cp "$root/check.sh" .
cp "$root/tools/common.sh" "$root/tools/fuzz.sh" "$root/tools/check_report.py" tools
# shellcheck disable=SC2016
program tools/setup.sh "sleep 600 & echo \$! >'$scratch/setup'" 'wait $!'
# shellcheck disable=SC2016
program build-fuzz/bin/a_fuzz "echo \$\$ >'$scratch/fuzzer'" 'exec sleep 600'
program bin/cmake
program bin/ninja
mkdir -p tests/fuzz/corpus/a
echo '{"build": null, "conformance": null, "fuzz": null, "lint": null, "python": null, "quick": null, "tsan": null}' >tests/budgets.json
touch tests/fuzz/a_fuzz.cc

for _ in 1 2; do  # the second time says that the first gave back what it held
  rm -f "$scratch/setup"
  ./check.sh lint >"$scratch/output" 2>&1 &
  first=$!
  await "$scratch/setup"
  status=0
  timeout 20 ./check.sh lint >"$scratch/output-second" 2>&1 || status=$?
  expect "status of a second check.sh" "$status" 2
  expect "what it says" "$(grep -c 'another ./check.sh runs in this clone' "$scratch/output-second")" 1
  kill "$(<"$scratch/setup")"
  wait "$first"
done

# Steps are over with the script: who starts the next one at once may.
program tools/setup.sh
for tool in source_files.py check_includes.py check_text.py; do program "tools/$tool"; done
./check.sh lint lint >"$scratch/output" 2>&1
expect "steps that were made" "$(grep -c '^==> ' "$scratch/output")" 4
status=0
flock --nonblock build/logs true || status=$?
expect "status of who takes the place of a check.sh that has ended" "$status" 0

# A bare root that is in use stays.
cp "$root/tools/bare_root.sh" tools
mkdir build/bare-root
status=0
flock build/bare-root.lock tools/bare_root.sh true >"$scratch/output" 2>&1 || status=$?
expect "status of a second bare_root.sh" "$status" 125
expect "what it says" "$(grep -c 'in use by another' "$scratch/output")" 1
expect "the root" "$(ls -d build/bare-root)" build/bare-root

# Suites wait neither for a build that left no report nor for an environment whose maker was killed.
program bin/cmake 'exit 1'
# shellcheck disable=SC2016
program tools/python_env.sh 'kill -KILL "$PPID"'
# shellcheck disable=SC2016
program tools/check_report.py 'if [[ $1$3 == suitebuild ]]; then exit 1; fi' "exec '$root/tools/check_report.py' \"\$@\""
status=0
PATH=$scratch/clone/bin:$PATH timeout 60 ./check.sh lint python >"$scratch/output" 2>&1 || status=$?
expect "status of a check.sh whose build ended without a report" "$status" 1
expect "what has failed of it" "$(sed -En 's/^  ((build|python): [^:]*): .*/\1/p' "$scratch/output")" \
  $'build: the suite\npython: tools/python_env.sh'
cp "$root/tools/check_report.py" tools

# Those of `quick` and conformance are partly the same tests.
for also in lint quick; do
  PATH=$scratch/clone/bin:$PATH timeout 60 ./check.sh conformance lint "$also" >"$scratch/output" 2>&1
  expect "whether conformance runs beside ${also}" "$(grep -c '^==> beside' "$scratch/output")" "$([[ $also == lint ]] && echo 1 || echo 0)"
done
program bin/cmake

# A check.sh that is ended ends what a suite has started.
# shellcheck disable=SC2016
program bin/cmake "echo \$\$ >'$scratch/cmake'" 'exec sleep 600'
PATH=$scratch/clone/bin:$PATH ./check.sh fuzz tsan >"$scratch/output" 2>&1 &
check=$!
await "$scratch/cmake"
kill -TERM "$check"
status=0
wait "$check" || status=$?
expect "status of a check.sh after SIGTERM" "$status" 143
expect "what a suite has started" "$(left_of "$(<"$scratch/cmake")")" ''
program bin/cmake

PATH=$scratch/clone/bin:$PATH tools/fuzz.sh a >"$scratch/output" 2>&1 &
fuzz=$!
await "$scratch/fuzzer"
kill -TERM "$fuzz"
status=0
wait "$fuzz" || status=$?
expect "status of fuzz.sh after SIGTERM" "$status" 143
expect "the fuzzer" "$(left_of "$(<"$scratch/fuzzer")")" ''
expect "failures that it tells of" "$(grep -c FAILED "$scratch/output")" 0

# interrupted HOW FILE: quickstart.sh, in a session of its own, gets a signal when FILE is there: SIGTERM alone, or with everything
# that it has in the foreground the SIGINT of a terminal.
interrupted() {
  PATH=$scratch/clone/bin:$PATH TMPDIR=$scratch timeout 60 python3 - "$@" >"$scratch/output" 2>&1 <<'END'
import os, signal, subprocess, sys, time
how, file = sys.argv[1:]
for name in (signal.SIGINT, signal.SIGTERM):
    signal.signal(name, signal.SIG_DFL)
process = subprocess.Popen(["./quickstart.sh", "--", "--text", "a.txt"], start_new_session=True)
while not (os.path.exists(file) and os.path.getsize(file)):
    time.sleep(0.02)
if how == "terminal":
    os.killpg(process.pid, signal.SIGINT)
else:
    process.terminate()
status = process.wait()
sys.exit(status if status >= 0 else 1)  # 1: it has not ended by itself
END
}
cp "$root/quickstart.sh" .
cp "$root/tools/with_server.sh" "$root/tools/packages.sh" tools
mkdir -p build/bin
cp "$here/fake_lossd.sh" build/bin/lossd
export FAKE_RECORD=$scratch/record
# shellcheck disable=SC2016
program build/bin/train_lm "echo \$\$ >'$scratch/trainer'" 'exec sleep 600'
for how in terminal alone; do
  if [[ $how == terminal ]]; then wanted=130; else wanted=143; fi
  rm -f "$scratch/trainer" "$scratch/record" "$scratch/ninja"
  program bin/ninja
  status=0
  interrupted "$how" "$scratch/trainer" || status=$?
  expect "status of quickstart.sh, stopped in training ($how)" "$status" "$wanted"
  expect "its last line" "$(tail -n 1 "$scratch/output")" 'stopped by a signal; the server is down'
  expect "the trainer" "$(left_of "$(<"$scratch/trainer")")" ''
  expect "the server's end" "$(tail -n 1 "$scratch/record")" stopped
  expect "errors that it tells of" "$(grep -c error: "$scratch/output")" 0

  # shellcheck disable=SC2016
  program bin/ninja "echo \$\$ >'$scratch/ninja'" 'trap "exit 2" INT' 'sleep 600 & wait'
  status=0
  interrupted "$how" "$scratch/ninja" || status=$?
  expect "status of quickstart.sh, stopped in the build ($how)" "$status" "$wanted"
  expect "its last line" "$(tail -n 1 "$scratch/output")" 'stopped by a signal'
  expect "the build" "$(left_of "$(<"$scratch/ninja")")" ''
  expect "errors that it tells of" "$(grep -c error: "$scratch/output")" 0
done

status=0
./quickstart.sh --steps 3 >"$scratch/output" 2>&1 || status=$?
expect "status of quickstart.sh with a flag of the example" "$status" 2
expect "what it advises" "$(grep -c 'unknown argument: --steps; .*: ./quickstart.sh -- --steps 3$' "$scratch/output")" 1

if ((failures)); then exit 1; fi
echo "ended in order"
