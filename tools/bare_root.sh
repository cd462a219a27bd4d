#!/usr/bin/env bash
# Runs a command in a clean clone of the last commit inside a Debian that has nothing but what cloning takes.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<END
usage: tools/bare_root.sh [--keep] COMMAND

Makes a minimal Debian 12 (debootstrap, with git and certificates alone) in build/bare-root, clones the last commit into it and runs
COMMAND, a line of bash, in the clone as root, with an empty environment. Processes, mounts and files of the root are gone in the end;
build/check.json and build/logs of the clone are left in build/bare-root.results. Takes root. Some 10 GB of disk for ./check.sh.

  --keep   leaves the root in build/bare-root; the next call makes a new one

What the machine knows about its network goes along: name servers, hosts, proxies (also apt's), certificates and pip's settings.
Packages and wheels are kept between calls in \${XDG_CACHE_HOME:-~/.cache}/lossd-bare-root.
Exit status: COMMAND's; 125 if the root could not be made, 2 for arguments that it does not know.

  tools/bare_root.sh ./quickstart.sh        # the first ten minutes on a bare machine
  tools/bare_root.sh './check.sh --cuda all'
END
}

keep=no
while (($#)); do
  case $1 in
    --keep) keep=yes ;;
    -h | --help) usage && exit ;;
    -*) usage >&2 && exit 2 ;;
    *) break ;;
  esac
  shift
done
if (($# != 1)); then usage >&2 && exit 2; fi

root=$repo_root/build/bare-root
results=$repo_root/build/bare-root.results
cache=${XDG_CACHE_HOME:-$HOME/.cache}/lossd-bare-root
log=$log_dir/bare-root.log
new=$root.new

# cannot MESSAGE...: there is no root to run anything in.
cannot() {
  printf '\nerror: %s\n' "$1" >&2
  shift
  if (($#)); then printf '       %s\n' "$@" >&2; fi
  exit 125
}

# What this machine knows about its network.
copy_network() {
  local file
  cp /etc/resolv.conf /etc/hosts "$new/etc/"
  apt-config dump --format '%f "%v";%n' |
    grep -E '^Acquire::([A-Za-z]+::)*(Proxy|Verify-Peer|Check-Valid-Until|Check-Date) ' >"$new/etc/apt/apt.conf.d/90network" || true
  for file in /usr/local/share/ca-certificates/*.crt; do
    if [[ -r $file ]]; then cp "$file" "$new/usr/local/share/ca-certificates/"; fi
  done
  chroot "$new" update-ca-certificates >/dev/null
  for file in /etc/pip.conf ~/.config/pip/pip.conf ~/.pip/pip.conf; do
    if [[ -r $file ]]; then cp "$file" "$new/etc/pip.conf"; fi
  done
}

# The root appears when it is whole.
make_root() {
  mkdir -p "$cache"/{debs,apt/partial,pip} &&
    debootstrap --variant=minbase --include=git,ca-certificates --cache-dir="$cache/debs" bookworm "$new" &&
    copy_network &&
    git clone --quiet --no-hardlinks "$repo_root" "$new/root/lossd" &&
    mv "$new" "$root"
}

enter() {
  local folder name environment=(HOME=/root TERM=dumb PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
  mount --bind "$root" "$root"  # a mount of its own: what makes namespaces inside changes how that is shared
  for folder in dev sys; do mount --rbind "/$folder" "$root/$folder"; done
  mount -t proc proc "$root/proc"
  mkdir -p "$root/root/.cache/pip"
  mount --bind "$cache/apt" "$root/var/cache/apt/archives"
  mount --bind "$cache/pip" "$root/root/.cache/pip"
  for name in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_DEFAULT_TIMEOUT; do
    if [[ -n ${!name:-} ]]; then environment+=("$name=${!name}"); fi
  done
  exec chroot "$root" /usr/bin/env -i "${environment[@]}" /bin/bash -c "cd ~/lossd && {
$1
}
exit"
}

# The script calls itself where mounts and processes are its own.
if [[ -n ${LOSSD_ENTER_BARE_ROOT:-} ]]; then enter "$1"; fi

# What runs inside holds the lock as well: a root that is in use is not removed.
mkdir -p "$repo_root/build"
exec {lock}>"$root.lock"
if ! flock --nonblock "$lock"; then cannot "build/bare-root is in use by another tools/bare_root.sh"; fi

if ((EUID != 0)); then cannot "a root is made and entered as root" "run: sudo tools/bare_root.sh ..."; fi
if ! command -v debootstrap >/dev/null; then
  try_step "$log" "Installing debootstrap" apt-get -y --no-install-recommends install debootstrap ||
    cannot "debootstrap could not be installed" "the whole log: ${log#"$repo_root"/}"
fi
rm -rf --one-file-system "$root" "$new" "$results"
try_step "$log" "Making a minimal Debian in build/bare-root" make_root ||
  cannot "a minimal Debian could not be made" "the whole log: ${log#"$repo_root"/}"

LOSSD_ENTER_BARE_ROOT=1 unshare --mount --pid --fork --kill-child --mount-proc "${BASH_SOURCE[0]}" "$1" &
inside=$!
trap 'kill -KILL "$inside"; exit 130' INT
trap 'kill -KILL "$inside"; exit 143' TERM
status=0
wait "$inside" || status=$?
mkdir "$results"
for result in check.json logs; do
  if [[ -e $root/root/lossd/build/$result ]]; then cp -r "$root/root/lossd/build/$result" "$results/"; fi
done
if [[ $keep == no ]]; then rm -rf --one-file-system "$root"; fi
if ((status)); then exit "$status"; fi
