#!/usr/bin/env bash
# Installs the client libraries into an empty prefix, builds programs outside the tree against them, in C++ and in C, and runs
# those against a real server.
#
#   package_test.sh SOURCE_DIR BUILD_DIR LOSSD CXX_COMPILER CXX_FLAGS
set -euo pipefail

source_dir=$1 build_dir=$2 lossd=$3 compiler=$4 flags=$5
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build_dir" --prefix "$work/prefix" --component lossd_client
# Nothing of the tree may be needed: the program is copied away from it.
cp -r "$here/outside" "$work/outside"
cmake -S "$work/outside" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$compiler" \
  -DCMAKE_CXX_FLAGS="$flags" -DCMAKE_PREFIX_PATH="$work/prefix"
cmake --build "$work/build"
# The same in C, with what the manual shows, built by CMake and by hand.
mkdir "$work/outside_c"
cp "$here/outside_c/CMakeLists.txt" "$work/outside_c/"
# shellcheck disable=SC2016  # the backquotes are the manual's
sed -n '/^```c$/,/^```$/{/^```/d;p}' "$source_dir/docs/c-api.md" >"$work/outside_c/main.c"
cmake -S "$work/outside_c" -B "$work/build_c" -G Ninja -DCMAKE_C_FLAGS="$flags" -DCMAKE_PREFIX_PATH="$work/prefix"
cmake --build "$work/build_c"
pkg_config_path=$(dirname "$(find "$work/prefix" -name lossd_c.pc)")
read -ra by_hand <<<"$flags $(PKG_CONFIG_PATH=$pkg_config_path pkg-config --cflags --libs lossd_c)"
cc -std=c99 -pedantic -Werror "$work/outside_c/main.c" -o "$work/by_hand" "${by_hand[@]}"
if grep -rq --include='*.cmake' --include='*.pc' -F "$source_dir" "$work/prefix"; then
  echo "the installed package names the source tree" >&2
  exit 1
fi
"$source_dir/tools/with_server.sh" "$lossd" "$work/lossd.log" -- "$work/build/outside" '127.0.0.1:{grpc}'
"$source_dir/tools/with_server.sh" "$lossd" "$work/lossd.log" --device=cpu -- "$work/build_c/outside_c" '127.0.0.1:{grpc}'
library_dir=$(dirname "$pkg_config_path")
LD_LIBRARY_PATH=$library_dir "$source_dir/tools/with_server.sh" "$lossd" "$work/lossd.log" --device=cpu -- \
  "$work/by_hand" '127.0.0.1:{grpc}'
