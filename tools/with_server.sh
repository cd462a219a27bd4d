#!/usr/bin/env bash
# Starts lossd on free loopback ports, runs one command against it, and stops it again however the command ends.
#
#   tools/with_server.sh LOSSD LOG [SERVER_FLAG...] -- COMMAND [ARG...]
#
# {grpc} and {metrics} in ARGs become the ports. Exit status: COMMAND's if it failed, else the server's; 128 + n after signal n.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

start_seconds=60
stop_seconds=60
server_pid='' command_pid='' server_status=0 run_dir=''

alive() { kill -0 "$1" 2>/dev/null; }

stop_server() {
  [[ -n $server_pid ]] || return 0
  local waited
  kill -TERM "$server_pid" 2>/dev/null || true
  for ((waited = 0; waited < stop_seconds * 10; waited++)); do
    alive "$server_pid" || break
    sleep 0.1
  done
  if alive "$server_pid"; then
    printf 'lossd did not stop within %d s of SIGTERM; killing it\n' "$stop_seconds" >&2
    kill -KILL "$server_pid"
  fi
  server_status=0
  wait "$server_pid" || server_status=$?
  server_pid=''
}

clean_up() {
  trap '' INT TERM HUP
  if [[ -n $command_pid ]]; then
    kill -TERM "$command_pid" 2>/dev/null || true
    wait "$command_pid" 2>/dev/null || true
  fi
  stop_server
  if [[ -n $run_dir ]]; then rm -rf "$run_dir"; fi
}

start_server() {
  local waited
  run_dir=$(mktemp -d)
  mkdir -p "$(dirname "$log")"
  # In a session of its own: Ctrl-C at a terminal is for the command, which still needs its server to end in order.
  setsid "$lossd" --listen=127.0.0.1:0 --metrics_listen=127.0.0.1:0 --port_file="$run_dir/ports.json" "${flags[@]}" \
    >"$log" 2>&1 </dev/null &
  server_pid=$!
  for ((waited = 0; waited < start_seconds * 10; waited++)); do
    if [[ -s $run_dir/ports.json ]]; then
      grpc_port=$(sed -n 's/.*"grpc": *\([0-9][0-9]*\).*/\1/p' "$run_dir/ports.json")
      metrics_port=$(sed -n 's/.*"metrics": *\([0-9][0-9]*\).*/\1/p' "$run_dir/ports.json")
      return
    fi
    if ! alive "$server_pid"; then
      show_tail "$log"
      fail "lossd ended before it served"
    fi
    sleep 0.1
  done
  show_tail "$log"
  fail "lossd did not serve within $start_seconds s"
}

(($# >= 4)) || fail "usage: tools/with_server.sh LOSSD LOG [SERVER_FLAG...] -- COMMAND [ARG...]"
lossd=$1 log=$2 flags=()
shift 2
while (($#)) && [[ $1 != -- ]]; do
  flags+=("$1")
  shift
done
(($# >= 2)) || fail "tools/with_server.sh: no command after --"
shift

trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
start_server

arguments=()
for argument in "$@"; do
  argument=${argument//\{grpc\}/$grpc_port}
  arguments+=("${argument//\{metrics\}/$metrics_port}")
done
# In the background, so that a signal to this script is acted on at once and not when the command is through.
"${arguments[@]}" &
command_pid=$!
status=0
wait "$command_pid" || status=$?
command_pid=''

if ! alive "$server_pid"; then
  wait "$server_pid" || server_status=$?
  server_pid=''
  show_tail "$log"
  fail "lossd ended on its own, with status $server_status, before it was stopped"
fi
stop_server
if ((status)); then exit "$status"; fi
if ((server_status)); then
  show_tail "$log"
  fail "lossd ended with status $server_status after SIGTERM"
fi
