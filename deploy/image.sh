#!/usr/bin/env bash
# Builds the image of lossd with docker, podman or buildah, whichever is there.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/../tools/common.sh"

usage() {
  cat <<END
usage: deploy/image.sh [--base IMAGE|DIR] [--tag NAME] [--sbom FILE] [--source URL] [--tool docker|podman|buildah] [cpu|cuda|trial] [-- TOOL_ARGUMENT...]

Builds the target of the Dockerfile (default: cpu) and says how large the image is.

  --base    what the image starts from and is built on: Debian 12 or Ubuntu 24.04, as the name of an image (default: debian:bookworm)
            or as a folder with a root file system, for instance of: debootstrap --variant=minbase bookworm DIR
  --tag     name of the image (default: lossd:VERSION-TARGET)
  --sbom    also write the list of its components there (CycloneDX, JSON)
  --source  where its source is, for the label org.opencontainers.image.source (default: the URL of git's remote origin, without
            what stands before its @; unknown, if that is a path or has another @)
  --tool    default: the first of docker, podman, buildah that is there

Arguments after -- are passed on to the tool's build command. Without a kernel that lets containers have namespaces:
deploy/image.sh --tool buildah -- --isolation=chroot
END
}

base=debian:bookworm tag='' sbom='' source='' tool='' target=cpu
while (($#)); do
  case $1 in
    --base) base=$2 && shift ;;
    --tag) tag=$2 && shift ;;
    --sbom) sbom=$2 && shift ;;
    --source) source=$2 && shift ;;
    --tool) tool=$2 && shift ;;
    cpu | cuda | trial) target=$1 ;;
    -h | --help) usage && exit ;;
    --) shift && break ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done

find_tool() {
  local candidate
  for candidate in docker podman buildah; do
    # A docker without a daemon cannot build.
    if command -v "$candidate" >/dev/null && { [[ $candidate != docker ]] || docker info >/dev/null 2>&1; }; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "there is none of docker, podman and buildah" "as root, run: apt-get install --no-install-recommends buildah crun"
}

# A folder becomes an image of its own.
import_base() {
  local folder=$1 name=localhost/lossd-base:imported container
  say "Importing $folder" >&2
  case $tool in
    buildah)
      container=$(buildah from scratch)
      buildah add -q "$container" "$folder" / >/dev/null
      buildah commit -q "$container" "$name" >/dev/null
      buildah rm "$container" >/dev/null
      ;;
    *) tar -C "$folder" --numeric-owner --one-file-system -c . | "$tool" import - "$name" >/dev/null ;;
  esac
  printf '%s\n' "$name"
}

# Copies one file out of the image.
copy_out() {
  local container
  case $tool in
    buildah)
      container=$(buildah from "$tag")
      cat "$(buildah mount "$container")/$1" >"$2"
      buildah rm "$container" >/dev/null
      ;;
    *)
      container=$("$tool" create "$tag")
      "$tool" cp "$container:/$1" "$2"
      "$tool" rm "$container" >/dev/null
      ;;
  esac
}

# Whoever cloned with a password in the URL does not want it in a label. With an unescaped / or @ in it nobody can tell where it ends.
source_of_origin() {
  local url
  url=$(git -C "$repo_root" config --get remote.origin.url 2>/dev/null || true)
  if [[ $url =~ ^(https?|ssh|git)://([^/@]*@)?([^@]+)$ ]]; then
    printf '%s\n' "${BASH_REMATCH[1]}://${BASH_REMATCH[3]}"
  else
    echo unknown
  fi
}

image_bytes() {
  case $tool in
    buildah) buildah images --format '{{.Size}}' "$tag" ;;
    *) "$tool" image inspect --format '{{.Size}}' "$tag" | awk '{printf "%.0f MB\n", $1 / 1e6}' ;;
  esac
}

if [[ -z $tool ]]; then tool=$(find_tool); fi
version=$(sed -n 's/^project(lossd VERSION \([0-9.]*\).*/\1/p' "$repo_root/CMakeLists.txt")
tag=${tag:-lossd:$version-$target}
if [[ -d $base ]]; then base=$(import_base "$base"); fi
revision=$(git -C "$repo_root" rev-parse HEAD 2>/dev/null || echo unknown)
arguments=(--target "$target" --tag "$tag" --build-arg "BASE=$base" --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
  --build-arg "CREATED=$(date -u +%Y-%m-%dT%H:%M:%SZ)")
arguments+=(--build-arg "SOURCE=${source:-$(source_of_origin)}")
# The format that has health checks.
case $tool in
  docker) command=(docker build) ;;
  *) command=("$tool" build --format docker) ;;
esac
log=$log_dir/image-$target.log
try_step "$log" "Building $tag with $tool on $base" "${command[@]}" "${arguments[@]}" "$@" "$repo_root" ||
  fail "the image could not be built" "the whole log: ${log#"$repo_root"/}"
if [[ -n $sbom ]]; then copy_out opt/lossd/share/sbom.cdx.json "$sbom"; fi
say "$tag: $(image_bytes)"
