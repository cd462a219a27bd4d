#!/usr/bin/env bash
# Installs the packages of tools/packages.sh that are missing, in one apt transaction; does nothing if none is.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$repo_root/tools/packages.sh"

usage() {
  cat <<END
usage: tools/setup.sh [build] [run] [test] [python] [cuda] [bundle] [image] [plot] [deploy] [fuzz]

Installs the distribution's packages that lossd needs and that are missing (root or sudo).
  build   compiler, build tools and libraries; where there is an NVIDIA driver without a CUDA compiler, that as well
  run     the manuals that the example trains on
  test    Python with gRPC and NumPy, clang-format; what tools/tidy_env.sh starts from
  python  Python with pip, venv and its headers, for client/python and its tests
  cuda    a CUDA compiler, whether or not there is an NVIDIA driver (tools/cuda_toolkit.sh; 0.7 GB to download)
  bundle  what deploy/bundle.sh needs
  image   what deploy/image_files.sh needs, which the Dockerfile runs
  plot    Python with matplotlib, for the plots of lossd-bench sweep
  deploy  Prometheus and Chromium, for the tests of what is in deploy/
  fuzz    clang with its run time, for the fuzzers of tests/fuzz
Without arguments: build, run and test.
END
}

export DEBIAN_FRONTEND=noninteractive
apt_log=$log_dir/setup.log
apt_options=(-y -o Dpkg::Use-Pty=0 -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)

as_root() {
  if ((EUID == 0)); then "$@"; else sudo DEBIAN_FRONTEND=noninteractive "$@"; fi
}

# Prints those of its arguments that are not installed.
missing_packages() {
  local installed
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p' || true)
  printf '%s\n' "$@" | grep -vxF "${installed:-/}" || true
}

check_system() {
  command -v apt-get >/dev/null || fail "this system has no apt-get" \
    "lossd is set up on Debian 12 and Ubuntu 24.04; elsewhere install the counterparts of" "$*"
  local id version name
  # shellcheck source=/dev/null
  id=$(. /etc/os-release && echo "$ID") version=$(. /etc/os-release && echo "${VERSION_ID:-}") name="$id $version"
  case $name in
    "debian 12" | "ubuntu 24.04") ;;
    *) say "note: $name has not been tried; Debian 12 and Ubuntu 24.04 have" ;;
  esac
  if ((EUID != 0)) && ! command -v sudo >/dev/null; then
    fail "packages are missing, and this is neither root nor is there sudo" "as root, run:" "apt-get install $*"
  fi
  # Asks for the password now, in the open, rather than inside a logged step.
  if ((EUID != 0)); then sudo -v; fi
}

explain_apt_failure() {
  local hints=("the whole log: ${apt_log#"$repo_root"/}")
  if grep -q 'Unable to locate package\|has no installation candidate' "$apt_log"; then
    hints+=("a package is unknown to apt. On Ubuntu the component 'universe' must be enabled: add it to Components in"
      "/etc/apt/sources.list.d/ubuntu.sources (or run: add-apt-repository universe) and try again.")
  elif grep -q 'Temporary failure resolving\|Could not connect\|Failed to fetch' "$apt_log"; then
    hints+=("the package mirror was not reached: check the network, DNS and any proxy in /etc/apt/apt.conf.d.")
  fi
  fail "apt-get could not install what is missing" "${hints[@]}"
}

update_lists() { try_step "$apt_log" "Refreshing the package lists" as_root apt-get "${apt_options[@]}" update; }

install_packages() {
  local count=$# attempt
  check_system "$@"
  # Lists that know every package are good enough to start with: `update` is the slow part of a second run.
  if ! apt-get install -s --no-install-recommends "$@" >/dev/null 2>&1; then update_lists || true; fi
  for attempt in 1 2 3; do
    if try_step "$apt_log" "Installing $count packages and what they depend on" \
      as_root apt-get "${apt_options[@]}" install --no-install-recommends "$@"; then
      return
    fi
    if grep -q 'Unable to locate package' "$apt_log"; then break; fi
    if ((attempt < 3)); then
      say "trying again"
      sleep $((attempt * 5))
      update_lists || true
    fi
  done
  explain_apt_failure
}

# Unpacks the manuals that dpkg was told to leave out (path-exclude) from their packages.
unpack_manuals() {
  local manual scratch=$corpus_dir/unpack
  for manual in "${manuals[@]}"; do
    if manual_path "$manual" >/dev/null; then continue; fi
    if ! try_step "$apt_log" "Unpacking ${manual#* }, which dpkg left out" unpack_manual "$manual" "$scratch"; then
      update_lists || true
      try_step "$apt_log" "Unpacking ${manual#* }" unpack_manual "$manual" "$scratch" || explain_apt_failure
    fi
    rm -rf "$scratch"
  done
}
unpack_manual() (
  mkdir -p "$2" && cd "$2" &&
    apt-get -o Acquire::Retries=3 download "${1%% *}" &&
    dpkg-deb -x "${1%% *}"_*.deb . &&
    find . -name "${1#* }" -exec cp {} "$corpus_dir/" \; &&
    test -r "$corpus_dir/${1#* }"
)

groups=("$@")
if ((${#groups[@]} == 0)); then groups=(build run test); fi
wanted=()
toolkit=no toolkit_arguments=()
for group in "${groups[@]}"; do
  case $group in
    build) wanted+=("${packages_build[@]}") toolkit=yes ;;
    run) wanted+=("${packages_run[@]}") ;;
    test) wanted+=("${packages_test[@]}") ;;
    python) wanted+=("${packages_python[@]}") ;;
    cuda) toolkit=yes toolkit_arguments=(--always) ;;
    bundle) wanted+=("${packages_bundle[@]}") ;;
    image) wanted+=("${packages_image[@]}") ;;
    plot) wanted+=("${packages_plot[@]}") ;;
    deploy) wanted+=("${packages_deploy[@]}") ;;
    fuzz) wanted+=("${packages_fuzz[@]}") ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
  esac
done
if [[ $toolkit == yes ]] && "$repo_root/tools/cuda_toolkit.sh" "${toolkit_arguments[@]}" --check; then
  wanted+=("${packages_cuda[@]}")
else
  toolkit=no
fi

mapfile -t missing < <(missing_packages "${wanted[@]}")
if ((${#missing[@]})); then install_packages "${missing[@]}"; fi
if [[ " ${groups[*]} " == *" run "* ]]; then unpack_manuals; fi
say "Packages: all ${#wanted[@]} present"
if [[ $toolkit == yes ]]; then "$repo_root/tools/cuda_toolkit.sh" "${toolkit_arguments[@]}"; fi
