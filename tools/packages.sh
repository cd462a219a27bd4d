# Everything lossd needs from the distribution, in one place. The names are the same on Debian 12 and Ubuntu 24.04. Sourced.
# shellcheck shell=bash disable=SC2034,SC2154

packages_build=(
  g++ cmake ninja-build ccache pkg-config
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  libdnnl-dev prometheus-cpp-dev libspdlog-dev nlohmann-json3-dev libcli11-dev libxxhash-dev
  zlib1g-dev libsentencepiece-dev libeigen3-dev
  libgtest-dev libgmock-dev
)
# The text that the example trains on.
packages_run=(debian-reference-en debian-policy developers-reference)
packages_test=(python3 python3-grpcio python3-protobuf python3-numpy clang-format-14 clang-tidy-14 libomp-14-dev shellcheck)

# PACKAGE PATH: where each manual lies once its package is installed.
manuals=(
  "debian-reference-en /usr/share/debian-reference/debian-reference.en.txt.gz"
  "debian-policy /usr/share/doc/debian-policy/policy.txt.gz"
  "developers-reference /usr/share/developers-reference/developers-reference.txt.gz"
)
# Where they are unpacked on systems whose dpkg leaves documentation out, as most container images do.
corpus_dir="$repo_root/build/corpus"

# The manuals' files, one a line; empty lines never occur. Fails if one is missing.
manual_files() {
  local entry path
  for entry in "${manuals[@]}"; do
    path=${entry#* }
    [[ -r $path ]] || path=$corpus_dir/$(basename "$path")
    [[ -r $path ]] || return 1
    printf '%s\n' "$path"
  done
}
