#!/usr/bin/env bash
# Installs the client library into an empty prefix, builds a program outside the tree against it, and runs that against a
# real server.
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
if grep -rq --include='*.cmake' -F "$source_dir" "$work/prefix"; then
  echo "the installed package names the source tree" >&2
  exit 1
fi
"$source_dir/tools/with_server.sh" "$lossd" "$work/lossd.log" -- "$work/build/outside" '127.0.0.1:{grpc}'
