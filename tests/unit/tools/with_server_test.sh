#!/usr/bin/env bash
# tools/with_server.sh stops its server however the command ends, and its status tells what went wrong.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
with_server=$here/../../../tools/with_server.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export FAKE_RECORD FAKE_STATUS FAKE_MODE TMPDIR=$scratch
failures=0

begin() {
  name=$1 FAKE_RECORD=$scratch/record FAKE_STATUS=0 FAKE_MODE=''
  rm -f "$FAKE_RECORD"
}
expect() {  # expect WHAT ACTUAL WANTED
  if [[ $2 != "$3" ]]; then
    printf '%s: %s is "%s", not "%s"\n' "$name" "$1" "$2" "$3"
    cat "$scratch/output"
    failures=$((failures + 1))
  fi
}
run() {
  status=0
  "$with_server" "$here/fake_lossd.sh" "$scratch/log" --device=auto -- "$@" >"$scratch/output" 2>&1 || status=$?
}
expect_stopped() { expect "end of the server" "$(tail -n 1 "$FAKE_RECORD")" stopped; }
says() { grep -c -- "$1" "$scratch/output"; }

begin "a command that succeeds"
run echo "ports {grpc} and {metrics}"
expect status "$status" 0
expect output "$(cat "$scratch/output")" "ports 4711 and 4712"
expect "flags passed on" "$(grep -c -- --device=auto "$FAKE_RECORD")" 1
expect_stopped
expect "left-over folders" "$(find "$scratch" -mindepth 1 -type d | wc -l)" 0

begin "a command that fails"
run sh -c 'exit 7'
expect status "$status" 7
expect_stopped

begin "a server that ends badly after SIGTERM"
FAKE_STATUS=5
run true
expect status "$status" 1
expect message "$(says 'status 5')" 1

begin "a server that never serves"
FAKE_MODE=dies
run true
expect status "$status" 1
expect "log shown" "$(says 'on fire')" 1

begin "a server that ends on its own"
FAKE_MODE=vanishes
run sleep 0.5
expect status "$status" 1
expect message "$(says 'ended on its own')" 1

for signal in INT TERM HUP terminal; do
  begin "SIG$signal while the command runs"
  # Started from Python with default signal handling: a background job of bash would ignore SIGINT.
  python3 - "$signal" "$with_server" "$here/fake_lossd.sh" "$scratch/log" -- \
    sh -c "echo \$\$ > $scratch/command; exec sleep 60" >"$scratch/output" 2>&1 <<'END' || true
import os, signal, subprocess, sys, time
terminal = sys.argv[1] == "terminal"  # Ctrl-C, which all processes in its foreground get
number = signal.SIGINT if terminal else getattr(signal, "SIG" + sys.argv[1])
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_DFL)
process = subprocess.Popen(sys.argv[2:], start_new_session=True)
command = os.path.join(os.environ["TMPDIR"], "command")
while not (os.path.exists(command) and os.path.getsize(command)):
    time.sleep(0.02)
if terminal:
    os.killpg(process.pid, number)
else:
    process.send_signal(number)
print("status", process.wait(), "of", 128 + number)
END
  read -r _ status _ wanted < <(grep '^status' "$scratch/output")
  expect status "$status" "$wanted"
  expect_stopped
  expect "signals that the server has seen itself" "$(grep -c interrupted "$FAKE_RECORD")" 0
  expect "the command still running" "$(kill -0 "$(cat "$scratch/command")" 2>/dev/null && echo yes)" ""
  rm -f "$scratch/command"
done

if ((failures == 0)); then echo "all as expected"; fi
exit $((failures > 0))
