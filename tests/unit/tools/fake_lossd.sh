#!/usr/bin/env bash
# Stands in for lossd: writes its port file, ends at SIGTERM with status $FAKE_STATUS and says so in $FAKE_RECORD.
# FAKE_MODE=dies: ends before it serves. FAKE_MODE=vanishes: ends on its own shortly after.
set -euo pipefail
for argument in "$@"; do
  case $argument in --port_file=*) port_file=${argument#*=} ;; esac
done
if [[ ${FAKE_MODE:-} == dies ]]; then
  echo "the device is on fire"
  exit 3
fi
trap 'echo stopped >>"$FAKE_RECORD"; exit "${FAKE_STATUS:-0}"' TERM
echo "{\"grpc\": 4711, \"metrics\": 4712}" >"$port_file.part"
mv "$port_file.part" "$port_file"
if [[ ${FAKE_MODE:-} == vanishes ]]; then exit 0; fi
echo "serving $*" >>"$FAKE_RECORD"
while :; do sleep 0.05; done
