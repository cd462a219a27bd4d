#!/usr/bin/env bash
# Builds lossd and lays out what an image of it holds beside its base. The Dockerfile runs it, in each of its build stages.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/../tools/common.sh"
source "$repo_root/tools/packages.sh"

usage() {
  cat <<END
usage: deploy/image_files.sh [--no-build] [--base-packages FILE] [--out DIR] cpu|cuda|trial

  cpu    DIR/opt/lossd with lossd, lossctl, their libraries, certificates of authorities, default configuration and
         list of components (SBOM); DIR/var/lib/lossd and DIR/run/lossd, the two folders that lossd may write to
  cuda   the same with CUDA code, libcublasLt and NCCL
  trial  DIR/opt/lossd with train_lm, what it needs and what it reads, to be laid over an image

  --no-build            take what is in build/bin
  --base-packages FILE  /var/lib/dpkg/status of the image's base, for the list of components
  --out DIR             default: /image, of trial /trial
END
}

# USER of the Dockerfile.
owner=65532:65532
target='' out='' build=yes components=()
while (($#)); do
  case $1 in
    --no-build) build=no ;;
    --base-packages) components+=(--base-packages "$2") && shift ;;
    --out) out=$2 && shift ;;
    cpu | cuda | trial) target=$1 ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done
if [[ -z $target ]]; then usage >&2 && exit 2; fi
if [[ -z $out ]]; then
  out=/image
  if [[ $target == trial ]]; then out=/trial; fi
fi
programs=(lossd lossctl)
if [[ $target == trial ]]; then programs=(train_lm); fi

build_programs() {
  local cuda=OFF
  if [[ $target == cuda ]]; then cuda=ON; fi
  if [[ $target != trial ]]; then
    configure_preset release -DLOSSD_CUDA=$cuda -DLOSSD_BUILD_TESTS=OFF
  fi
  build_targets build "${programs[@]}"
}

# Beside lossd's other libraries is where it looks for them.
add_cuda_libraries() {
  local toolkit=$repo_root/build/cuda-toolkit
  cp -L "$toolkit"/lib/{libcublasLt.so.13,libnccl.so.2} "$out/opt/lossd/lib/"
  mkdir -p "$out/opt/lossd/share/licences/nvidia"
  cp -r "$toolkit"/licenses/nvidia_{cublas,cuda_runtime,nccl_cu13}-*.dist-info "$out/opt/lossd/share/licences/nvidia/"
  for wheel in "$toolkit"/licenses/nvidia_{cublas,cuda_runtime,nccl_cu13}-*.dist-info; do components+=(--wheel "$wheel"); done
}

if [[ $build == yes ]]; then build_programs; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$repo_root/deploy/bundle.sh" --strip --out "$scratch" "${programs[@]}"
rm -rf "$out/opt/lossd"
mkdir -p "$out/opt"
mv "$scratch/lossd" "$out/opt/lossd"
if [[ $target == trial ]]; then
  "$repo_root/tools/setup.sh" run
  mkdir -p "$out/opt/lossd/share/text"
  mapfile -t texts < <(manual_files)
  cp -L "${texts[@]}" "$out/opt/lossd/share/text/"
  # What is in the image already stays as it is there.
  rm -rf "$out"/opt/lossd/share/{LICENSE,NOTICE,THIRD_PARTY.md}
  exit
fi
rm -rf "$out"/opt/lossd/{smoke.sh,tools}
share=$out/opt/lossd/share
cp -L /etc/ssl/certs/ca-certificates.crt "$share/"
cp "$repo_root/deploy/image.json" "$share/lossd.json"
if [[ $target == cuda ]]; then add_cuda_libraries; fi
python3 "$repo_root/deploy/sbom.py" --root "$out/opt/lossd" --version "$(sed -n 's/^CMAKE_PROJECT_VERSION:STATIC=//p' \
  "$repo_root/build/CMakeCache.txt")" "${components[@]}" >"$share/sbom.cdx.json"
install -d -m 0700 "$out/var/lib/lossd"
install -d -m 0750 "$out/run/lossd"
# Else they are whoever's this is, who is not going to be root in the image.
if ((EUID == 0)); then chown "$owner" "$out/var/lib/lossd" "$out/run/lossd"; fi
say "Layout of the image in $out: $(du -sh --apparent-size "$out" | cut -f1)"
