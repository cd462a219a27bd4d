#!/usr/bin/env bash
# Makes build/tidy: clang-tidy, as tools/tidy.py wants it. Does nothing if it is there already.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$repo_root/tools/packages.sh"

usage() {
  cat <<END
usage: tools/tidy_env.sh

Makes build/tidy, a virtual environment with bin/clang-tidy, out of the wheel that tools/packages.sh names (tidy_wheel): the
distribution's, of LLVM 14, takes three times as long and sees less. 60 MB to download. Needs no root; what it starts from,
tools/setup.sh test installs.
END
}

case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac

target=$repo_root/build/tidy
log=$log_dir/tidy-env.log

make() {
  make_venv "$target" "$tidy_wheel" && "$target/bin/clang-tidy" --version
}

if [[ -r $target/contents && $(<"$target/contents") == "$tidy_wheel" ]]; then exit; fi
try_step "$log" "Making build/tidy ($tidy_wheel)" make ||
  fail "build/tidy could not be made" "the whole log: ${log#"$repo_root"/}" "tools/setup.sh test installs python3-venv"
# Written when everything is in place.
printf '%s\n' "$tidy_wheel" >"$target/contents"
