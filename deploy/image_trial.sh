#!/usr/bin/env bash
# Runs the image as it should be run (its own user, nothing but its volume to write to, no capability, no network) and lets the
# example of quickstart.sh train against it; then stops it, starts it again, and sees whether it goes on.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/../tools/common.sh"

usage() {
  cat <<END
usage: deploy/image_trial.sh [--tool docker|podman] [--image NAME] [--steps N] [-- RUN_ARGUMENT...]

  --tool   default: the first of docker and podman that is there
  --image  of the target trial (default: lossd:VERSION-trial): deploy/image.sh trial
  --steps  of training (default: 40)

Arguments after -- are passed on to the tool's run command, for instance --ulimit=nofile=4096:4096.
END
}

version=$(sed -n 's/^project(lossd VERSION \([0-9.]*\).*/\1/p' "$repo_root/CMakeLists.txt")
tool='' image=lossd:$version-trial steps=40
while (($#)); do
  case $1 in
    --tool) tool=$2 && shift ;;
    --image) image=$2 && shift ;;
    --steps) steps=$2 && shift ;;
    -h | --help) usage && exit ;;
    --) shift && break ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done
if [[ -z $tool ]]; then
  if docker info >/dev/null 2>&1; then tool=docker; else tool=podman; fi
fi
command -v "$tool" >/dev/null || fail "there is neither docker nor podman" "as root, run: apt-get install --no-install-recommends podman crun"

name=lossd-trial-$$
inside() { "$tool" exec "$name" "$@"; }
clean_up() {
  "$tool" rm --force "$name" >/dev/null 2>&1 || true
  "$tool" volume rm --force "$name" >/dev/null 2>&1 || true
}
trap clean_up EXIT

# What its HEALTHCHECK asks.
wait_until_healthy() {
  until inside lossctl health --server 127.0.0.1:50052 >/dev/null 2>&1; do
    if [[ $("$tool" inspect --format '{{.State.Running}}' "$name") != true ]]; then
      "$tool" logs "$name" >&2
      fail "the container has ended"
    fi
    sleep 0.2
  done
}
expect() {
  local what=$1 wanted=$2 found=$3
  if [[ $found != "$wanted" ]]; then fail "$what is '$found', not '$wanted'"; fi
  say "$what: $found"
}
incarnation() { inside lossctl status --json | sed -n 's/.*"incarnation": "\{0,1\}\([^",]*\).*/\1/p'; }

say "Starting $image with $tool"
"$tool" run --detach --name "$name" --read-only --cap-drop=ALL --security-opt=no-new-privileges --network=none \
  --volume "$name:/var/lib/lossd" "$@" "$image" \
  --config=/opt/lossd/share/lossd.json --device=cpu >/dev/null
wait_until_healthy
expect "user and group" 65532:65532 "$(inside id -u):$(inside id -g)"
expect "capabilities" 0000000000000000 "$(inside sed -n 's/^CapEff:\t//p' /proc/1/status)"
for folder in / /opt/lossd /etc /usr /var; do
  if inside touch "$folder/written" 2>/dev/null; then fail "$folder can be written to"; fi
done
expect "health check" "$(printf '%s' '[CMD lossctl health --server 127.0.0.1:50052 --timeout 4]')" \
  "$("$tool" inspect --format '{{.Config.Healthcheck.Test}}' "$name")"

say "Training $steps steps"
inside train_lm --text-dir /opt/lossd/share/text --steps "$steps" --head lm_head
before=$(incarnation)

say "Stopping it, and starting it again"
"$tool" stop --time 60 "$name" >/dev/null
expect "exit status after the drain" 0 "$("$tool" inspect --format '{{.State.ExitCode}}' "$name")"
"$tool" start "$name" >/dev/null
wait_until_healthy
expect "incarnation, as before" "$before" "$(incarnation)"
inside lossctl head list
printf '\nthe image works\n'
