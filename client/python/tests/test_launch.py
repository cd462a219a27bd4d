"""lossd.launch: found, started, shown when it fails, and gone with the process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until

import lossd
from lossd import server as server_module


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_launch_and_stop() -> None:
    server = lossd.launch("cpu")
    assert server.target.startswith("unix:") and "serving" in server.log()
    folder = Path(server.target.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o077 == 0
    with server.client() as client:
        assert client.status().device == "cpu"
        client.create_region("system", 4096).close()
    assert server.stop() == 0 and server.stop() == 0
    assert not alive(server.process.pid) and not folder.exists()
    assert "serving" in server.log()  # what it wrote is still there to be looked at


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there are GPUs: then it starts")
def test_all_devices_are_gpus() -> None:
    with pytest.raises(lossd.LaunchError, match="--devices is 'all'; no CUDA device can be used here"):
        lossd.launch("all")


def test_several_devices_hold_a_head_between_them() -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((101, 16), np.float32)
    hidden, labels = rng.standard_normal((7, 16), np.float32), rng.integers(0, 101, 7)
    results = []
    for device in ("cpu", "cpu,cpu,cpu"):
        with lossd.launch(device) as server, server.client() as client:
            head = client.create_head("lm_head", 101, 16, "float32", fixed_segments=True)
            head.write_weights(weights)
            with head.open_session() as session:
                result = session.compute(hidden, labels)
            gradient = np.empty_like(weights)
            head.flush(gradient)
            results.append((np.asarray(result.losses), np.asarray(result.dx), gradient))
            status, memory = client.status(), client.memory()
            assert ("3 ranks" in status.device_description) == ("," in device)
            ranks = [0, 1, 2] if "," in device else []
            assert [rank.rank for rank in status.ranks] == [rank.rank for rank in memory.ranks] == ranks
            assert all(rank.waited_seconds > 0 and rank.uptime_seconds > 0 for rank in status.ranks[:1])
            assert all(rank.reserved_bytes == memory.reserved_bytes for rank in memory.ranks[:1])
        assert not alive(server.process.pid)
    for one, many in zip(*results, strict=True):
        np.testing.assert_array_equal(one, many)


@pytest.fixture
def short_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def test_its_folder_is_in_the_first_place_that_is_of_use(short_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder_of(length: int) -> str:
        path = os.path.join(short_folder, "x" * (length - len(short_folder) - 1))
        os.makedirs(path, exist_ok=True)
        return path

    most = 107 - len("/lossd-12345678/regions.sock")
    fits, too_long, unwritable = folder_of(most), folder_of(most + 1), "/proc/self"
    for tmpdir, runtime_directory, place in (
        (fits, short_folder, fits),
        (too_long, short_folder, short_folder),
        (folder_of(200), too_long, "/tmp"),
        (f"{short_folder}/none", short_folder, short_folder),
        (unwritable, short_folder, short_folder),
        (unwritable, unwritable, "/tmp"),
        ("", short_folder, short_folder),
        (None, short_folder, short_folder),
        (None, None, "/tmp"),
    ):
        for name, value in (("TMPDIR", tmpdir), ("RUNTIME_DIRECTORY", runtime_directory)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        with lossd.launch("cpu") as server, server.client() as client:
            assert os.path.dirname(os.path.dirname(server.target.removeprefix("unix:"))) == place
            client.create_region("system", 4096).close()
    monkeypatch.setenv("TMPDIR", f"{short_folder}/none")
    monkeypatch.setenv("RUNTIME_DIRECTORY", too_long)
    with pytest.raises(lossd.LaunchError, match="set TMPDIR to .* short path") as failed:
        server_module._socket_folder("s" * 88)
    for reason in ("TMPDIR: too long by", "RUNTIME_DIRECTORY: too long by 77 bytes", "/tmp: too long by 1 bytes"):
        assert reason in str(failed.value)


def test_without_regions() -> None:
    with lossd.launch("cpu", regions=False) as server, server.client() as client:
        with pytest.raises(lossd.FailedPreconditionError, match="same_host_regions"):
            client.create_region("system", 4096)


def test_arguments() -> None:
    with lossd.launch("cpu", memory_limit_bytes=600 << 20, args=["--max_heads=1"]) as server:
        with server.client(reconnect_timeout=0.2) as client:
            assert client.memory().limit_bytes == 600 << 20
            client.create_head("a", 4, 4)
            with pytest.raises(lossd.ResourceExhaustedError, match="the limit is 1"):
                client.create_head("b", 4, 4)


def test_it_shows_its_log_when_it_fails(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(lossd.LaunchError, match="(?s)ended with status .*cuda:7"):
        lossd.launch("cuda:7")
    with pytest.raises(lossd.LaunchError, match="(?s)no_such_flag"):
        lossd.launch("cpu", args=["--no_such_flag=1"])
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\necho so far so good\nexec sleep 1000\n")
    sleeper.chmod(0o755)
    # On a busy machine it may take a while until the shell has come to its first line.
    for start_timeout in (0.5, 5.0, 50.0):
        with pytest.raises(lossd.LaunchError, match=f"did not serve within {start_timeout} s") as raised:
            lossd.launch(program=sleeper, start_timeout=start_timeout)
        if "so far so good" in str(raised.value):
            break
    assert "so far so good" in str(raised.value)
    assert set(threading.enumerate()) <= before


def test_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = server_module.find_program()
    with pytest.raises(lossd.LaunchError, match="none is not a program"):
        server_module.find_program(tmp_path / "none")
    for address in ("127.0.0.1:50051", "a:50051,b:50051", "[::1]:5", "unix:/run/lossd/socket", "dns:///trainer:50051"):
        monkeypatch.setenv("LOSSD_BINARY", address)
        with pytest.raises(lossd.LaunchError, match="an address; .*lossctl as LOSSD_SERVER"):
            server_module.find_program()
    monkeypatch.setenv("LOSSD_BINARY", str(tmp_path))
    with pytest.raises(lossd.LaunchError, match="from LOSSD_BINARY"):
        server_module.find_program()
    monkeypatch.delenv("LOSSD_BINARY")
    monkeypatch.setenv("PATH", str(known.parent))
    monkeypatch.setattr(server_module, "__file__", str(tmp_path / "lossd" / "server.py"))
    assert server_module.find_program() == known
    monkeypatch.setenv("PATH", "")
    with pytest.raises(lossd.LaunchError, match="there is no program lossd"):
        server_module.find_program()
    wheel = tmp_path / "lossd" / "bin" / "lossd"
    wheel.parent.mkdir(parents=True)
    wheel.symlink_to(known)
    assert server_module.find_program() == wheel


ALONE_IN_TORCHRUN = """
    import os, pathlib, lossd
    assert os.environ["WORLD_SIZE"] == "2" and "MASTER_ADDR" in os.environ
    os.environ["SLURM_PROCID"] = os.environ["OMPI_COMM_WORLD_RANK"] = os.environ["LWS_WORKER_INDEX"] = "1"
    os.environ["KEPT"] = "1"
    with lossd.launch("cpu") as server, server.client() as client:
        environment = pathlib.Path(f"/proc/{server.process.pid}/environ").read_text()
        seen = {each.split("=")[0] for each in environment.split("\\0")}
        assert "KEPT" in seen and not seen & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
        assert not [name for name in seen if name.startswith(("SLURM_", "OMPI_", "LWS_", "TORCHELASTIC_"))]
        assert not client.status().ranks
"""
GROUP_IN_TORCHRUN = """
    import os, pathlib, time, lossd
    other_serves = pathlib.Path(os.environ["TOKEN"] + ".other")
    network = ["--collective_network=trusted", "--collective_interface=lo"]
    args = [*network, "--group_token_file=" + os.environ["TOKEN"], "--group_leader=" + os.environ["LEADER"]]
    with lossd.launch("cpu", group="torchrun", args=args) as server:
        if os.environ["RANK"] == "0":
            with server.client() as client:
                assert [rank.rank for rank in client.status().ranks] == [0, 1]
            while not other_serves.exists():
                time.sleep(0.02)
        else:
            other_serves.touch()
            assert server.process.wait() == 0  # the first one drains all
"""


def torchrun(script: str, folder: Path, **variables: str) -> None:
    """Two processes of this script, each of which has to come to its end."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script) + '\nprint("process", os.environ["RANK"], "is done", flush=True)\n')
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    assert "process 0 is done" in done.stdout and "process 1 is done" in done.stdout


def test_inside_torchrun_a_server_is_one_by_itself(tmp_path: Path) -> None:
    torchrun(ALONE_IN_TORCHRUN, tmp_path)


def test_servers_inside_torchrun_are_a_group_if_that_is_asked_for(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        leader = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun(GROUP_IN_TORCHRUN, tmp_path, TOKEN=str(token), LEADER=leader)


def test_a_node_of_a_group_takes_all_gpus_unless_told_which(tmp_path: Path) -> None:
    program = tmp_path / "lossd"
    program.write_text('#!/bin/sh\necho "given: $*"\nexit 1\n')
    program.chmod(0o755)
    for device, flag in (("auto", "--devices=all"), ("cuda:1", "--devices=cuda:1")):
        with pytest.raises(lossd.LaunchError, match=f"given: {flag} "):
            lossd.launch(device, program=program, group="torchrun")


CHILD = """
    import os, signal, sys, lossd
    servers = [lossd.launch("cpu", checkpoint_dir=folder) for folder in (None, {checkpoint_dir!r})]
    for server in servers:
        print(server.process.pid, server.target.removeprefix("unix:"), flush=True)
    {end}
"""


def test_the_server_finds_what_it_opens_of_nvidia_in_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheels = tmp_path / "nvidia"
    for name, library in (("nccl", "libnccl.so.2"), ("cu13", "libcublasLt.so.13"), ("other", "libother.so")):
        (wheels / name / "lib").mkdir(parents=True)
        (wheels / name / "lib" / library).touch()
    monkeypatch.setitem(sys.modules, "nvidia", None)
    del sys.modules["nvidia"]
    monkeypatch.syspath_prepend(str(tmp_path))
    program = tmp_path / "lossd"
    program.write_text('#!/bin/sh\necho "searched: $LD_LIBRARY_PATH"\nexit 1\n')
    program.chmod(0o755)
    for given, before in ((None, ""), ("/mine", "/mine:")):
        if given is None:
            monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        else:
            monkeypatch.setenv("LD_LIBRARY_PATH", given)
        with pytest.raises(lossd.LaunchError) as failed:
            lossd.launch("cpu", program=program)
        searched = str(failed.value).split("searched: ")[1].splitlines()[0].split(":")
        assert str(wheels / "nccl" / "lib") in searched and str(wheels / "cu13" / "lib") in searched
        assert str(wheels / "other" / "lib") not in searched
        assert ":".join(searched).startswith(before)


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGHUP)",
        "os.setpgrp(); os.killpg(0, signal.SIGTERM)",
        "os._exit(3)",
        "sys.exit(0)",
        "raise RuntimeError('a notebook that fails')",
        "os.abort()",
    ],
)
def test_it_ends_with_the_process_and_leaves_no_folder(end: str, tmp_path: Path) -> None:
    """With checkpoints and without."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD).format(end=end, checkpoint_dir=str(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    launched = [child.stdout.readline().split() for _ in range(2)]
    child.wait()
    for pid, place in launched:
        wait_until(lambda pid=pid: not alive(int(pid)), "the server ends with its parent")
        wait_until(lambda place=place: not Path(place).parent.exists(), "the server's folder is removed")


def test_it_outlives_the_thread_that_launched_it() -> None:
    made: list[lossd.Server] = []
    thread = threading.Thread(target=lambda: made.append(lossd.launch("cpu")))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as server, server.client() as client:
        assert client.status().device == "cpu"


def test_a_forked_child_leaves_it_alone() -> None:
    with lossd.launch("cpu") as server, server.client() as client:
        head = client.create_head("a", 4, 4, "float32")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                client.status()
            except RuntimeError as error:
                status = 0 if "forked" in str(error) else 2
            try:
                del head, client
                server._at_exit()
            except BaseException:
                status = 3
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.status().device == "cpu" and head.info().generation == 1


def in_fork(work: Callable[[], object]) -> str:
    """What `work` raises in a forked child, which a test must not wait for without end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            work()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        message = told.read().decode()
    os.waitpid(pid, 0)
    return message


@pytest.mark.parametrize("closed", [False, True])
def test_a_forked_child_of_a_client_does_not_connect(closed: bool) -> None:
    with lossd.launch("cpu") as server:
        client = server.client()
        if closed:
            client.close()
        for work in (server.client, lambda: lossd.connect("localhost:1"), lambda: lossd.launch("cpu")):
            message = in_fork(work)
            assert message.startswith("RuntimeError") and "forked" in message and "'spawn'" in message


def test_a_child_that_was_forked_before_connects() -> None:
    script = """
        import os, lossd
        server = lossd.launch("cpu")
        if os.fork() == 0:
            with lossd.connect(server.target) as client:
                os._exit(0 if client.status().device == "cpu" else 1)
        child = os.waitstatus_to_exitcode(os.wait()[1])
        with server.client() as client:
            assert child == 0 and client.status().device == "cpu"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_signals_for_the_group_do_not_reach_it() -> None:
    """Ctrl-C in a terminal goes to the trainer, which may want to save."""
    with lossd.launch("cpu") as server:
        assert os.getpgid(server.process.pid) != os.getpgid(0)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
