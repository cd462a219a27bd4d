#!/usr/bin/env bash
# Brings a CUDA compiler, its run time, cuBLAS and NCCL as wheels from PyPI into build/cuda-toolkit, where they are needed; without root.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$repo_root/tools/packages.sh"

usage() {
  cat <<END
usage: tools/cuda_toolkit.sh [--always] [--check | --driver]

Where there is an NVIDIA driver but no CUDA compiler (nvcc in PATH, \$CUDA_HOME or /usr/local/cuda), brings one as wheels from
PyPI into build/cuda-toolkit, in the layout of an installed toolkit; the build finds it there. About 0.7 GB to download, 1.3 GB on
disk. Does nothing on a machine without a driver, and nothing the second time. The versions are in tools/packages.sh.

  --always  also without a driver, and beside another CUDA compiler
  --check   only tell: exit status 0 if there is something to bring, else 1
  --driver  only tell: exit status 0 if there is an NVIDIA driver, else 1
END
}

target=$repo_root/build/cuda-toolkit
log=$log_dir/cuda-toolkit.log
always=no check=no driver=no
for argument in "$@"; do
  case $argument in
    --always) always=yes ;;
    --check) check=yes ;;
    --driver) driver=yes ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
  esac
done

has_driver() {
  command -v nvidia-smi >/dev/null || [[ -e /dev/nvidiactl ]] || compgen -G '/usr/lib/wsl/lib/libcuda.so.1' >/dev/null ||
    /sbin/ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1 '
}
has_compiler() { command -v nvcc >/dev/null || [[ -x ${CUDA_HOME:-}/bin/nvcc || -x /usr/local/cuda/bin/nvcc ]]; }

wanted() {
  [[ $(uname -m) == x86_64 ]] || return 1
  if [[ $always == no ]] && { ! has_driver || has_compiler; }; then return 1; fi
  ! present
}
present() { [[ -r $target/wheels.txt && $(<"$target/wheels.txt") == "${cuda_wheels[*]}" ]]; }

# Prints a Python that has pip.
find_pip() {
  local python
  for python in python3 /usr/bin/python3; do
    if "$python" -m pip --version >/dev/null 2>&1; then
      printf '%s\n' "$python"
      return
    fi
  done
  return 1
}

# Everything happens beside the target, which appears when it is complete.
bring() {
  local python=$1 scratch=$target.new
  rm -rf "$scratch" && mkdir -p "$scratch/tmp" &&
    TMPDIR=$scratch/tmp "$python" -m pip install --disable-pip-version-check --no-cache-dir --no-deps --only-binary=:all: \
      --progress-bar=off --no-warn-script-location --target "$scratch/wheels" "${cuda_wheels[@]}" &&
    ln -s lib "$scratch/wheels/nvidia/cu13/lib64" &&
    mv "$scratch/wheels/nvidia/nccl/lib/libnccl.so.2" "$scratch/wheels/nvidia/cu13/lib/" &&
    mv "$scratch"/wheels/nvidia/nccl/include/*.h "$scratch/wheels/nvidia/cu13/include/" &&
    mkdir "$scratch/wheels/nvidia/cu13/licenses" &&
    (cd "$scratch/wheels" && for folder in *.dist-info; do cp -r "$folder" nvidia/cu13/licenses/; done) &&
    "$scratch/wheels/nvidia/cu13/bin/nvcc" --version &&
    printf '%s\n' "${cuda_wheels[*]}" >"$scratch/wheels/nvidia/cu13/wheels.txt" &&
    rm -rf "$target" && mv "$scratch/wheels/nvidia/cu13" "$target" && rm -rf "$scratch"
}

# Wheels that somebody asked for must come; otherwise there is a build without them.
give_up() {
  rm -rf "$target.new"
  if [[ $always == yes ]]; then fail "$@"; fi
  say "note: $1; lossd is built for the CPU only"
  shift
  if (($#)); then printf '    %s\n' "$@"; fi
  exit 0
}

if [[ $driver == yes ]]; then
  if has_driver; then exit 0; else exit 1; fi
fi
if [[ $check == yes ]]; then
  if wanted; then exit 0; else exit 1; fi
fi
if ! wanted; then
  if [[ $always == yes ]] && present; then say "CUDA toolkit: present in build/cuda-toolkit"; fi
  exit 0
fi
python=$(find_pip) || give_up "no CUDA compiler, and no pip to bring one with" "as root, run: apt-get install ${packages_cuda[*]}"
try_step "$log" "Bringing a CUDA toolkit from PyPI (0.7 GB)" bring "$python" ||
  give_up "the CUDA toolkit did not come" "the whole log: ${log#"$repo_root"/}"
