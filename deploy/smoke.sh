#!/usr/bin/env bash
# Lies at the root of a bundle (deploy/bundle.sh) and shows that it runs here: starts lossd on a free port, asks for its status,
# trains a small model against it for a few steps, stops it. Needs no root and writes to a temporary folder only.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<END
usage: smoke.sh [--steps N] [LOSSD_FLAG...]

Starts lossd on a free loopback port, runs lossctl status and N steps (default 20) of train_lm against it, and stops it.
LOSSD_FLAG... are passed on to lossd, for instance --device=cpu.
END
}

# What runs while the server is up: smoke.sh --against ADDRESS STEPS.
against() {
  local texts=("$here"/share/text/*.gz)
  # A bundle without texts has its licences to read.
  if [[ ! -r ${texts[0]} ]]; then texts=("$here"/share/*.md "$here"/share/LICENSE "$here"/share/licences/*); fi
  "$here/bin/lossctl" --server "$1" status
  "$here/bin/train_lm" --server "$1" --text "${texts[@]}" --vocabulary 2048 --batch 1024 --steps "$2"
}

steps=20
while (($#)); do
  case $1 in
    -h | --help) usage && exit ;;
    --steps) steps=$2 && shift ;;
    --against) against "$2" "$3" && exit ;;
    *) break ;;
  esac
  shift
done

log_folder=$(mktemp -d)
trap 'rm -rf "$log_folder"' EXIT
"$here/tools/with_server.sh" "$here/bin/lossd" "$log_folder/lossd.log" "$@" -- \
  "$here/smoke.sh" --against "127.0.0.1:{grpc}" "$steps"
printf '\nsmoke test passed\n'
