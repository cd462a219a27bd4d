#!/usr/bin/env bash
# From a fresh machine to a language model whose last stage lives in lossd: sets up, builds, starts the server, trains.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/tools/common.sh"
source "$repo_root/tools/packages.sh"

usage() {
  cat <<END
usage: ./quickstart.sh [--build-only] [-- TRAIN_LM_FLAG...]

Installs what is missing (Debian 12 or Ubuntu 24.04; root or sudo), builds lossd, starts it on a free loopback port and
trains a small language model against it. The summary is left in build/quickstart.json, logs in build/logs/.

  --build-only   stop after the build
  -- FLAG...     passed on to the example; see: build/bin/train_lm --help
END
}

build_only=no
while (($#)); do
  case $1 in
    --build-only) build_only=yes ;;
    -h | --help) usage && exit ;;
    --) shift && break ;;
    *)
      printf 'unknown argument: %s; what is meant for the example goes behind --: ./quickstart.sh -- %s\n\n' "$1" "$*" >&2
      usage >&2
      exit 2
      ;;
  esac
  shift
done

# What was started ends before this script does. Set-up alone is waited for, so that no package stays half installed.
step='' training=''
stop() { # stop STATUS
  trap '' HUP INT TERM
  local down=''
  if [[ -n $step ]]; then kill -TERM -- "-$step" 2>/dev/null || true; fi
  if [[ -n $training ]]; then
    kill -TERM "$training" 2>/dev/null || true
    down='; the server is down'
  fi
  wait || true
  printf '\nstopped by a signal%s\n' "$down" >&2
  exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM

# build_step LOG TITLE COMMAND...: try_step in a process group of its own, which a signal ends at once and as a whole.
build_step() {
  local status=0
  set -m
  try_step "$@" &
  step=$!
  set +m
  wait "$step" || status=$?
  step=''
  return "$status"
}

began=$SECONDS
"$repo_root/tools/setup.sh" build run

# Configured once, and again when a CUDA toolkit has come since.
if [[ ! -f $repo_root/build/build.ninja || $repo_root/build/cuda-toolkit/wheels.txt -nt $repo_root/build/build.ninja ]]; then
  build_step "$log_dir/configure.log" "Configuring" configure_preset release ||
    fail "cmake could not configure the build" "the whole log: build/logs/configure.log"
fi
build_step "$log_dir/build.log" "Building lossd and the example" build_targets build lossd lossctl train_lm ||
  fail "the build failed" "the whole log: build/logs/build.log"
if [[ $build_only == yes ]]; then exit; fi

# The manuals, unless a text was asked for.
texts=()
if [[ " $* " != *" --text"* ]]; then
  mapfile -t texts < <(manual_files)
  texts=(--text "${texts[@]}")
fi
say "Training: the head, its loss and its gradients in lossd, everything below in the example"
status=0
"$repo_root/tools/with_server.sh" "$repo_root/build/bin/lossd" "$log_dir/lossd.log" --device=auto -- \
  "$repo_root/build/bin/train_lm" --server "127.0.0.1:{grpc}" --json "$repo_root/build/quickstart.json" \
  "${texts[@]}" "$@" &
training=$!
wait "$training" || status=$?
training=''
if ((status == 129 || status == 130 || status == 143)); then
  printf '\nstopped by a signal; the server is down\n' >&2
  exit "$status"
elif ((status)); then
  show_tail "$log_dir/lossd.log" 20
  fail "training failed (status $status); the server is down" "the server's log: build/logs/lossd.log" \
    "after mending the cause run ./quickstart.sh again: what is built stays built"
fi
say "Done in $((SECONDS - began)) s; the summary is in build/quickstart.json, the server has stopped"
