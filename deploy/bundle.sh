#!/usr/bin/env bash
# Packs what is built into one archive that runs without installing anything on Debian 12, Ubuntu 24.04 and later x86-64 Linux.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/../tools/common.sh"
source "$repo_root/tools/packages.sh"

usage() {
  cat <<END
usage: deploy/bundle.sh [--tests] [--strip] [--sanitizer] [--out DIR] [PROGRAM...]

Makes DIR/lossd (a folder, in the place of one that is there) and DIR/lossd-VERSION-linux-x86_64.tar.gz of what lies in build/bin,
with the shared libraries of it. Unpacked anywhere, by anybody, its programs run; what a machine has to bring is glibc 2.36 or newer and, for a
GPU, the NVIDIA driver and libcublasLt (of a CUDA toolkit or of PyTorch: anywhere in LD_LIBRARY_PATH, or copied into lib/).

  PROGRAM...   programs of build/bin to pack; default: ${default_programs[*]}
  --tests      the test programs, lossd-bench, the text that train_lm trains on, and gpu_check.sh as well
  --strip      without debug information: 30 to 100 MiB less, but no line numbers in back traces
  --sanitizer  compute-sanitizer as well, for gpu_check.sh (28 MiB; of tools/cuda_toolkit.sh). Its licence is NVIDIA's: for your own
               machines only
  --out DIR    default: build/bundle

To try the archive:  tar xzf lossd-*.tar.gz && lossd/smoke.sh
END
}

default_programs=(lossd lossctl lossd-perf train_lm)
# What every Linux machine has (glibc), and what belongs to the machine's driver and toolkit.
glibc='ld-linux[^/]*|lib(c|m|mvec|pthread|dl|rt|resolv|util|anl|nsl|thread_db|nss_[a-z]*)\.so[^/]*'
nvidia='lib(cuda|cublas|cudart|cudnn|nvidia|nv|nccl)[^/]*'

tests=no strip=no sanitizer=no out=$repo_root/build/bundle programs=()
while (($#)); do
  case $1 in
    --tests) tests=yes ;;
    --strip) strip=yes ;;
    --sanitizer) sanitizer=yes ;;
    --out) out=$2 && shift ;;
    -h | --help) usage && exit ;;
    -*) usage >&2 && exit 2 ;;
    *) programs+=("$(basename "$1")") ;;
  esac
  shift
done
if ((${#programs[@]} == 0)); then programs=("${default_programs[@]}"); fi

bin=$repo_root/build/bin
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$out/lossd
licences=$root/share/licences

# Programs that have a path of this build compiled in would not run elsewhere.
is_bound_to_build() { grep -qF "$bin" "$1"; }

add_tests() {
  local path left_out=()
  programs+=(lossd-bench)
  for path in "$bin"/*_test "$bin"/*_tests; do
    if is_bound_to_build "$path"; then
      left_out+=("$(basename "$path")")
    else
      programs+=("$(basename "$path")")
    fi
  done
  if ((${#left_out[@]})); then say "Left out, since they need this build: ${left_out[*]}"; fi
}

check_programs() {
  local program missing=()
  for program in "${programs[@]}"; do
    if [[ ! -x $bin/$program ]]; then missing+=("$program"); fi
  done
  if ((${#missing[@]})); then
    fail "not in build/bin: ${missing[*]}" "build first: cmake --preset release && cmake --build build --target ${missing[*]}"
  fi
}

# The libraries of programs, one path a line.
libraries_of() {
  local listed
  listed=$(ldd "$@")
  if grep -q 'not found' <<<"$listed"; then
    fail "a library is missing here" "$(grep 'not found' <<<"$listed" | sort -u)"
  fi
  sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p' <<<"$listed" | sort -u | grep -vE "/($glibc|$nvidia)\$"
}

# The copyright file of the package that a library came in.
copy_licence() {
  local package
  package=$(dpkg -S "$(readlink -f "$1")" 2>/dev/null || dpkg -S "$1" 2>/dev/null) || return 0
  package=${package%%: *}
  package=${package%%:*}
  if [[ -r /usr/share/doc/$package/copyright ]]; then cp -L "/usr/share/doc/$package/copyright" "$licences/$package"; fi
}

copy_sanitizer() {
  local nvcc toolkit found=''
  nvcc=$(sed -n 's/^CMAKE_CUDA_COMPILER:[A-Z]*=//p' "$repo_root/build/CMakeCache.txt")
  for toolkit in "${nvcc%/bin/nvcc}" "$repo_root/build/cuda-toolkit"; do
    if [[ -x $toolkit/bin/compute-sanitizer && -r $toolkit/lib/libsanitizer-collection.so ]]; then found=$toolkit && break; fi
  done
  [[ -n $found ]] || fail "there is no compute-sanitizer of wheels" "tools/cuda_toolkit.sh --always brings one"
  mkdir -p "$root/sanitizer/bin" "$root/sanitizer/lib"
  cp -L "$found/bin/compute-sanitizer" "$root/sanitizer/bin/"
  cp -L "$found"/lib/lib{sanitizer,TreeLauncher,Interceptor}*.so* "$root/sanitizer/lib/"
  # Beside the program is where it looks for its tools.
  ln -sf ../lib/libsanitizer-collection.so "$root/sanitizer/bin/libsanitizer-collection.so"
}

[[ $(uname -sm) == "Linux x86_64" ]] || fail "bundles are made on x86-64 Linux"
groups=(bundle)
if [[ $tests == yes ]]; then groups+=(run); fi
"$repo_root/tools/setup.sh" "${groups[@]}"
if [[ $tests == yes ]]; then add_tests; fi
# train_lm starts it, from its own folder.
if [[ " ${programs[*]} " == *" train_lm "* ]]; then programs+=(train_lm_tokenizer); fi
mapfile -t programs < <(printf '%s\n' "${programs[@]}" | sort -u)
check_programs

rm -rf "$root"
mkdir -p "$root/bin" "$root/lib" "$root/tools" "$licences"
say "Packing ${#programs[@]} programs"
for program in "${programs[@]}"; do
  cp "$bin/$program" "$root/bin/"
  if [[ $strip == yes ]]; then strip "$root/bin/$program"; fi
  # RPATH, not RUNPATH: it serves the libraries' own needs too, and no LD_LIBRARY_PATH puts other versions in their place.
  patchelf --force-rpath --set-rpath "\$ORIGIN/../lib" "$root/bin/$program"
done
# The benchmarks draw with them, if the machine's Python can.
if [[ " ${programs[*]} " == *" lossd-bench "* ]]; then cp "$repo_root/bench/kernels/plot_sweep.py" "$root/bin/"; fi
if [[ " ${programs[*]} " == *" lossd-perf "* ]]; then cp "$repo_root/client/tools/perf/plot_perf.py" "$root/bin/"; fi
listed=$(libraries_of "${programs[@]/#/$bin/}")
for library in $listed; do
  cp -L "$library" "$root/lib/"
  copy_licence "$library"
  if [[ $library == "$repo_root"/* && $strip == yes ]]; then strip --strip-unneeded "$root/lib/$(basename "$library")"; fi
done
cp "$repo_root"/{LICENSE,NOTICE,THIRD_PARTY.md} "$root/share/"
cp "$repo_root"/tools/{common,with_server}.sh "$root/tools/"
cp "$repo_root/deploy/smoke.sh" "$root/"
if [[ $tests == yes ]]; then
  mkdir -p "$root/share/text"
  mapfile -t texts < <(manual_files)
  cp -L "${texts[@]}" "$root/share/text/"
  for manual in "${manuals[@]}"; do
    if [[ -r /usr/share/doc/${manual%% *}/copyright ]]; then
      cp -L "/usr/share/doc/${manual%% *}/copyright" "$licences/${manual%% *}"
    fi
  done
  cp "$repo_root/deploy/gpu_check.sh" "$root/"
fi
if [[ $sanitizer == yes ]]; then copy_sanitizer; fi

# What is packed must not lean on this machine.
outside=$(LD_LIBRARY_PATH='' ldd "${programs[@]/#/$root/bin/}" | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p' | sort -u |
  grep -vE "/($glibc)\$" | grep -vF "$root/" || true)
if [[ -n $outside ]]; then fail "the programs of the bundle still use libraries of this machine" "$outside"; fi

version=$(sed -n 's/^CMAKE_PROJECT_VERSION:STATIC=//p' "$repo_root/build/CMakeCache.txt")
archive=$out/lossd-$version-linux-x86_64.tar.gz
tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner -czf "$archive" lossd
mebibytes() { awk '{printf "%.1f MiB\n", $1 / 1048576}'; }
folder_size() { du -s --apparent-size -B1 "$1" | mebibytes; }
say "Programs $(folder_size "$root/bin"), libraries $(folder_size "$root/lib"), all $(folder_size "$root")"
say "${archive#"$repo_root"/}: $(stat -c %s "$archive" | mebibytes)"
