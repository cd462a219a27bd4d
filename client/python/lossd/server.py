"""A private server of this process on this host: what a notebook needs instead of a deployment."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import lossd._gone as _gone
from lossd._handles import refuse_if_forked
from lossd.client import Client, connect
from lossd.errors import LaunchError

PROGRAM = "lossd"
TAIL_BYTES = 6000  # of the log, in errors

_ADDRESS = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6):.*|[^/]*:\d+(,[^/]*:\d+)*")

# What launchers of several processes say to each of them. It is meant for this process, which a server of its own is no
# part of.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "LWS_")

# Runs in a process of its own, which then becomes the server: it dies with the thread that started it. A preexec_fn
# would run Python between fork and exec of a process with many threads. A child of the trampoline removes the folder
# once the processes of the server have closed the pipe. SIGHUP, SIGINT and SIGTERM do not end that child.
_TRAMPOLINE = """
import ctypes, os, shutil, signal, sys
parent, number, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ended, held = os.pipe()
if os.fork() == 0:
    os.setsid()
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    os.close(held)
    os.read(ended, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
os.set_inheritable(held, True)
if ctypes.CDLL(None).prctl(1, number, 0, 0, 0) or os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[4], sys.argv[4:])
"""


def find_program(program: str | os.PathLike[str] | None = None) -> Path:
    """The server: `program`, else $LOSSD_BINARY, the one of the wheel, of $PATH, of this repository's build/bin."""
    named = program if program is not None else os.environ.get("LOSSD_BINARY") or None
    if named is not None:
        path = Path(named).absolute()
        if program is None and not path.exists() and _ADDRESS.fullmatch(str(named)):
            raise LaunchError(
                f"LOSSD_BINARY is {named!r}, an address; want the path of the server's program. Give the address to "
                "lossd.connect(...), or to lossctl as LOSSD_SERVER"
            )
        if not os.access(path, os.X_OK) or path.is_dir():
            raise LaunchError(
                f"{path} is not a program that can be run (from {'program' if program else 'LOSSD_BINARY'})"
            )
        return path
    package = Path(__file__).resolve().parent
    places = [package / "bin" / PROGRAM]
    found = shutil.which(PROGRAM)
    if found is not None:
        places.append(Path(found))
    if len(package.parents) >= 3:  # ROOT/client/python/lossd
        places.append(package.parents[2] / "build" / "bin" / PROGRAM)
    for path in places:
        if os.access(path, os.X_OK):
            return path
    raise LaunchError(
        f"there is no program {PROGRAM} (looked at $LOSSD_BINARY, {package / 'bin'}, $PATH and the repository's "
        f"build/bin): install the wheel, or build the target lossd and name it with program=... or LOSSD_BINARY"
    )


def _environment(*, in_group: bool) -> dict[str, str]:
    """This process's, in which the server also finds what it opens of NVIDIA's among the wheels of this Python (those
    that PyTorch brings). What a launcher has said to this process is left out, unless the server shall have it, too."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if in_group or (name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES))
    }
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # something else of this name
        spec = None
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    opened = ("libnccl.so.2", "libcublasLt.so.13")
    folders = [
        str(lib) for place in places for lib in place.glob("*/lib") if any((lib / name).exists() for name in opened)
    ]
    given = environment.get("LD_LIBRARY_PATH")
    if folders:
        environment["LD_LIBRARY_PATH"] = ":".join([*([given] if given else []), *sorted(folders)])
    return environment


def _end_of(status: int) -> str:
    if status >= 0:
        return f"has ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


class Server:
    """Made by launch(). Ends with this process, whatever way that goes, or with stop(). A context manager."""

    def __init__(
        self, command: list[str], folder: Path, start_timeout: float, die_with: int, *, in_group: bool
    ) -> None:
        self._folder = folder
        self._environment = _environment(in_group=in_group)
        # Not in the folder, which goes before the log is read for the last time.
        self._log: IO[bytes] = tempfile.TemporaryFile(dir=folder.parent)  # noqa: SIM115
        weakref.finalize(self, self._log.close)
        self._port_file = folder / "ports.json"
        self._gone = _gone.watched(self.target)
        self._pid = os.getpid()
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: BaseException | None = None
        # The kernel ends the server with the thread that started it, so that is one which lives until then.
        self._thread = threading.Thread(
            target=self._run, args=(self._wrapped(command, die_with, folder),), name="lossd-server", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise LaunchError(f"{command[0]} could not be started: {self._error}") from self._error
        atexit.register(self._at_exit)
        self._wait_until_it_serves(command, start_timeout)

    @staticmethod
    def _wrapped(command: list[str], die_with: int, folder: Path) -> list[str]:
        if not sys.executable:  # embedded somewhere: then only stop() and atexit end the server
            return command
        return [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), str(die_with), str(folder), *command]

    def _run(self, command: list[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                env=self._environment,
            )
        except BaseException as error:  # noqa: BLE001, the starter raises it
            self._error = error
            self._started.set()
            return
        self._started.set()
        self._gone.tell(f"the server of lossd.launch {_end_of(self._process.wait())}. {self._end_of_log()}")

    def _wait_until_it_serves(self, command: list[str], timeout: float) -> None:
        until = time.monotonic() + timeout
        try:
            while not self._serves():
                if not self._thread.is_alive() or self.process.poll() is not None:
                    self._fail(f"{command[0]} ended with status {self.process.poll()} before it served")
                if time.monotonic() > until:
                    self._fail(f"{command[0]} did not serve within {timeout} s")
                time.sleep(0.02)
        except BaseException:
            self.stop(timeout=0)
            raise

    def _serves(self) -> bool:
        # That of node 3 of a group is ports.json.3, so that one command line does for all nodes.
        paths = [path for path in self._folder.glob("ports.json.*") if path.suffix[1:].isdigit()]
        for path in (self._port_file, *paths):
            try:
                json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            return True
        return False

    def _fail(self, message: str) -> None:
        raise LaunchError(f"{message}. {self._end_of_log()}")

    def _end_of_log(self) -> str:
        return f"Its log ends with:\n{self.log()[-TAIL_BYTES:].strip() or '(nothing)'}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def target(self) -> str:
        """What connect() takes: "unix:...". Other processes of this user on this host may connect, too."""
        return f"unix:{self._folder / 'socket'}"

    def client(self, **options: Any) -> Client:
        """connect(server.target, ...). Once the server has ended, calls fail with UnavailableError at once."""
        return connect(self.target, **options)

    def log(self) -> str:
        """What the server has written so far; also after it has ended."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def stop(self, timeout: float = 60.0) -> int:
        """Lets the server finish what it has accepted, and ends it after `timeout` seconds if it has not. Returns its
        exit status. May be called again."""
        process = self.process
        if process.poll() is None and timeout > 0:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
        if process.poll() is None:
            process.kill()
        status = process.wait()
        self._thread.join()
        atexit.unregister(self._at_exit)
        shutil.rmtree(self._folder, ignore_errors=True)
        return status

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.stop(timeout=5)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(timeout=60 if error is None else 0)

    def __repr__(self) -> str:
        return f"<lossd.Server {self.target}, process {self.process.pid}>"


def _socket_folder(socket_name: str) -> Path:
    """A new folder for this user alone, in TMPDIR, RUNTIME_DIRECTORY or /tmp: the first that can be written to and that
    leaves room for `socket_name` in the path of a Unix socket."""
    most = 107  # bytes
    places = {name: os.environ.get(name) for name in ("TMPDIR", "RUNTIME_DIRECTORY")} | {"/tmp": "/tmp"}  # noqa: S108
    reasons = []
    for name, place in places.items():
        if not place:
            continue
        beyond = len(os.fsencode(Path(place).absolute() / "lossd-12345678" / socket_name)) - most
        if beyond > 0:
            reasons.append(f"{name}: too long by {beyond} bytes")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="lossd-", dir=Path(place).absolute()))  # mode 0700
        except OSError as error:
            reasons.append(f"{name}: {error.strerror}")
    raise LaunchError(
        f"there is no folder for the server's sockets ({', '.join(reasons)}): set TMPDIR to a folder with a short path "
        "that this process can write to"
    )


def launch(
    device: str = "auto",
    *,
    program: str | os.PathLike[str] | None = None,
    args: Sequence[str] = (),
    regions: bool = True,
    memory_limit_bytes: int | str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
    restore: bool = True,
    group: str | None = None,
    start_timeout: float = 60.0,
) -> Server:
    """Starts a server for this process alone, on a Unix socket, and waits until it serves.

    device: "auto" (a GPU if there is one), "cpu", "cuda:0", ...; several with commas, "cpu,cpu", or "all" GPUs, hold
    every head between them. program: the server's, as find_program finds it.
    args: further flags, as `lossd --help` lists them. regions: share memory with it instead of sending. checkpoint_dir:
    where checkpoints are, and what the server saves to when it is stopped. restore: go on from what is there; False
    refuses to start where an earlier server has left its state.
    weights_dir: of safetensors files for Head.load_weights.
    group: as --group, "torchrun" for instance, with what else it needs in args: the server is one node of a group over
    several hosts, and clients connect to that of node 0 alone. "auto" is then "all": every GPU that it sees, shared out
    where several processes of a launcher are on one host. Without it the server is one by itself, whatever has
    launched this process: it does not see the variables of torchrun, srun and mpirun.

    LaunchError, with the end of the server's log, if it does not start. The server dies with this process, by
    PR_SET_PDEATHSIG (killed, or with a checkpoint_dir asked to end) and by atexit. Its folder goes with it, and is in
    $TMPDIR, $RUNTIME_DIRECTORY or /tmp: the first that can be written to and has a short enough path for a socket.
    RuntimeError in a process that was forked after a connect, which could not connect to it.
    """
    refuse_if_forked()
    path = find_program(program)
    if group is not None and device == "auto":
        device = "all"
    several = "," in device or device == "all" or group is not None
    folder = _socket_folder("regions.sock" if regions else "socket")
    flags = [
        f"--devices={device}" if several else f"--device={device}",
        f"--listen=unix:{folder / 'socket'}",
        "--metrics_listen=",
        f"--port_file={folder / 'ports.json'}",
    ]
    if regions:
        flags += ["--same_host_regions", f"--region_socket_dir={folder}"]
    if memory_limit_bytes is not None:
        flags.append(f"--memory_limit_bytes={memory_limit_bytes}")
    if checkpoint_dir is not None:
        flags.append(f"--checkpoint_dir={os.fspath(checkpoint_dir)}")
        flags.append(f"--restore={str(restore).lower()}")
    if weights_dir is not None:
        flags.append(f"--weights_dir={os.fspath(weights_dir)}")
    if group is not None:
        flags.append(f"--group={group}")
    die_with = signal.SIGKILL if checkpoint_dir is None else signal.SIGTERM
    return Server([str(path), *flags, *args], folder, start_timeout, int(die_with), in_group=group is not None)
