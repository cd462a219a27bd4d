#!/usr/bin/env bash
# Makes build/venv: Python with what client/python/requirements-test.txt names. Does nothing if that is there already.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<END
usage: tools/python_env.sh [--check]

Makes build/venv, a virtual environment with PyTorch, Transformers, pytest and what else the tests and examples of the Python
package need (client/python/requirements-test.txt), from the package index that pip is set up for: some 3 GB. The package lossd
itself is not installed: the tests take it from client/python, and the library and the server from build/.

  --check   say whether it is there and as it should be (exit status 0), without making it
END
}

requirements=$repo_root/client/python/requirements-test.txt
venv=$repo_root/build/venv
stamp=$venv/requirements.txt
python=${PYTHON:-python3}

check=no
case ${1:-} in
  '') ;;
  --check) check=yes ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac

if [[ -x $venv/bin/python ]] && cmp -s "$requirements" "$stamp"; then
  say "Python: build/venv is there"
  exit
fi
if [[ $check == yes ]]; then
  say "Python: build/venv is not there, or of other requirements"
  exit 1
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  fail "$python is not there, or older than 3.10" "tools/setup.sh python installs it; PYTHON=... names another"
if [[ ! -x $venv/bin/pip ]]; then
  rm -rf "$venv"
  try_step "$log_dir/python-venv.log" "Making build/venv" "$python" -m venv "$venv" ||
    fail "python3 -m venv does not work" "tools/setup.sh python installs what it needs (python3-venv)"
fi
# A stamp that says more than there is would last: it is written when everything is in place.
rm -f "$stamp"
try_step "$log_dir/python-packages.log" "Installing PyTorch, Transformers, pytest and others into build/venv" \
  "$venv/bin/pip" install --disable-pip-version-check --no-compile --retries 5 -r "$requirements" ||
  fail "pip could not install client/python/requirements-test.txt" "the whole log: build/logs/python-packages.log" \
    "without a network, set PIP_FIND_LINKS or PIP_INDEX_URL to where the packages are"
cp "$requirements" "$stamp"
