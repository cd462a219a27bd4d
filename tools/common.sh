# Messages, logged steps and time keeping for quickstart.sh, check.sh and the scripts beside this file. Sourced, never run.
# shellcheck shell=bash disable=SC2034

repo_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
log_dir="$repo_root/build/logs"

# gRPC would take even loopback addresses to a proxy that the environment names.
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"

say() { printf '==> %s\n' "$*"; }

# fail MESSAGE [HINT...]: every hint is a line of its own.
fail() {
  printf '\nerror: %s\n' "$1" >&2
  shift
  if (($#)); then printf '       %s\n' "$@" >&2; fi
  exit 1
}

# show_tail LOG [LINES]
show_tail() {
  printf '\n--- last lines of %s\n' "${1#"$repo_root"/}" >&2
  tail -n "${2:-40}" "$1" >&2 || true
  printf -- '---\n' >&2
}

# Prints where a running step stands: in place on a terminal, otherwise a line every 20 seconds. It waits without a process, which
# would outlive it, and keep what the script has open.
report_progress() {
  local log=$1 title=$2 began=$SECONDS parent=$$ next=20 line never
  exec {never}<> <(:)
  while kill -0 "$parent" 2>/dev/null; do
    read -r -t 1 -u "$never" line || true
    line=$(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c1-60) || true
    if [[ -t 1 ]]; then
      printf '\r\033[K    %s: %d s  %s' "$title" $((SECONDS - began)) "$line"
    elif ((SECONDS - began >= next)); then
      next=$((SECONDS - began + 20))
      printf '    %s: %d s  %s\n' "$title" $((SECONDS - began)) "$line"
    fi
  done
}

# try_step LOG TITLE COMMAND...: runs COMMAND with its output in LOG while progress is shown. The exit status is COMMAND's; if it
# is not zero the end of LOG has been printed.
try_step() {
  local log=$1 title=$2 began=$SECONDS status=0 reporter
  shift 2
  mkdir -p "$(dirname "$log")"
  say "$title"
  : >"$log"
  report_progress "$log" "$title" &
  reporter=$!
  "$@" >"$log" 2>&1 </dev/null || status=$?
  kill "$reporter" 2>/dev/null || true
  wait "$reporter" 2>/dev/null || true
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
  if ((status)); then
    show_tail "$log"
  else
    printf '    done in %d s\n' $((SECONDS - began))
  fi
  return "$status"
}

# configure_preset PRESET [-DOPTION...]; build_targets TREE [TARGET...] (none: all of them)
configure_preset() { (cd "$repo_root" && cmake --preset "$@"); }
build_targets() {
  local tree=$1
  shift
  NINJA_STATUS='[%f/%t, %e s] ' ninja -C "$repo_root/$tree" "$@"
}

# end_tree PID: ends it and all that it has started, but not this script itself. Parents first, or they would tell of children that failed.
end_tree() {
  local child children
  children=$(pgrep -P "$1") || true
  if (($1 != $$)); then kill "$1" 2>/dev/null || true; fi
  for child in $children; do end_tree "$child"; done
}

# make_venv DIR WHEEL...: a new virtual environment, of wheels alone, in the place of what is there.
make_venv() {
  local venv=$1
  shift
  rm -rf "$venv" &&
    "${PYTHON:-/usr/bin/python3}" -m venv "$venv" &&
    "$venv/bin/pip" install --disable-pip-version-check --retries 5 --only-binary=:all: "$@"
}
