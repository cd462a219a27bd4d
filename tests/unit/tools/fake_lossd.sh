#!/usr/bin/env bash
# Stands in for lossd: writes its port file, ends at SIGTERM with status $FAKE_STATUS and says so in $FAKE_RECORD.
# FAKE_MODE=dies: ends before it serves. FAKE_MODE=vanishes: ends on its own shortly after.
# It acts on SIGINT, as lossd does even where it was started in the background, which has bash ignore it.
set -euo pipefail
if [[ -z ${FAKE_AGAIN:-} ]]; then FAKE_AGAIN=yes exec env --default-signal=INT "$0" "$@"; fi
for argument in "$@"; do
  case $argument in --port_file=*) port_file=${argument#*=} ;; esac
done
if [[ ${FAKE_MODE:-} == dies ]]; then
  echo "the device is on fire"
  exit 3
fi
trap 'echo interrupted >>"$FAKE_RECORD"; exit 1' INT
trap 'echo stopped >>"$FAKE_RECORD"; exit "${FAKE_STATUS:-0}"' TERM
echo "{\"grpc\": 4711, \"metrics\": 4712}" >"$port_file.part"
mv "$port_file.part" "$port_file"
if [[ ${FAKE_MODE:-} == vanishes ]]; then exit 0; fi
echo "serving $*" >>"$FAKE_RECORD"
while :; do sleep 0.05; done
