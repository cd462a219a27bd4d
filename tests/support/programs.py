"""The one starter of processes of tests that are scripts. A program writes to a log, which every failure quotes, and is killed
when its test ends, whatever the end is."""
import atexit
import contextlib
import faulthandler
import select
import signal
import subprocess
import sys
import unittest
from pathlib import Path

from waiting import PATIENCE, wait_until

_started = set()


@atexit.register
def _kill_all():
    for process in _started:
        if process.poll() is None:
            process.kill()
            process.wait()


def run(*command, **options):
    """A program that ends by itself, with its output and its exit status."""
    return subprocess.run([*map(str, command)],
                          **{"capture_output": True, "text": True, "check": False, "timeout": PATIENCE, **options})


class StillRuns(AssertionError):
    """A program that did not end in time."""


def stacks(pid):
    """Where the threads of a process are: by gdb, and without it, or without the right to use it, by what the kernel tells."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        traced = run("gdb", "-p", pid, "-batch", "-ex", "set print frame-arguments none", "-ex", "thread apply all bt 16", timeout=60)
        if lines := [line[:200] for line in traced.stdout.splitlines() if line.startswith(("Thread ", "#"))]:
            return "\n".join(lines)
    return "\n".join(_of_kernel(task) for task in sorted(Path(f"/proc/{pid}/task").glob("*")))


def _of_kernel(task):
    told = [task.name]
    for name in ("comm", "wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            told.append((task / name).read_text(errors="replace").strip())
    return "  ".join(told)


def join(threads):
    """Waits for the end of threads. Where one does not end, the failure says where this process and all programs are."""
    def last():
        return [thread.name for thread in threads if thread.is_alive()]
    try:
        wait_until(lambda: not last(), lambda: f"the end of {last()}")
    except AssertionError as error:
        faulthandler.dump_traceback()
        programs = [f"{each.args[0]}:\n{stacks(each.pid)}" for each in _started if each.poll() is None]
        raise AssertionError("\n".join([str(error), *programs])) from None


class Program:
    """A program that runs from start() to its end, and again from the next start() on. Its log has the output of all its
    lives. Where it ends, the test has asked for that or has looked: close() and the next start() fail otherwise. `options`
    are those of subprocess.Popen."""

    def __init__(self, *command, log, **options):
        self._command, self.log_path, self._options = [*map(str, command)], Path(log), options
        self._process = None
        self._end_is_known = False  # to the test

    def command(self):
        return self._command

    def start(self, *arguments, **options):
        self._refuse_unknown_end()
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen([*self.command(), *map(str, arguments)],
                                             **{"stdout": log, "stderr": log, **self._options, **options})
        _started.add(self._process)
        self._end_is_known = False
        return self

    @property
    def pid(self):
        return self._process.pid

    @property
    def stdin(self):
        return self._process.stdin

    @property
    def stdout(self):
        return self._process.stdout

    def read_line(self):
        """The next line of its standard output, which it writes line by line."""
        if not select.select([self.stdout], [], [], PATIENCE)[0]:
            raise StillRuns(f"{self._process.args[0]} has said nothing for {PATIENCE} s:\n{self.last_words()}")
        return self.stdout.readline()

    def poll(self):
        """The exit status, or None while it runs."""
        status = self._process.poll()
        self._end_is_known |= status is not None
        return status

    def running(self):
        return self._process is not None and self.poll() is None

    def signal(self, number):
        """Does nothing where the program has ended."""
        if self._process.poll() is None:
            self._end_is_known |= number not in (signal.SIGSTOP, signal.SIGCONT, signal.SIGHUP)
            self._process.send_signal(number)

    def wait(self, seconds=PATIENCE):
        """Waits for the end of the program and returns its exit status."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            still = f"{self._process.args[0]} still runs after {seconds} s:\n{self.last_words()}"
            raise StillRuns(f"{still}\nIts threads:\n{stacks(self.pid)}" if seconds >= PATIENCE else still) from None
        _started.discard(self._process)
        self._end_is_known = True
        return status

    def stop(self):
        """SIGTERM; returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self):
        """Does nothing where the program does not run."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self.wait()

    def log(self):
        """The lines that are complete: the last one may be half written."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return text[:text.rfind("\n") + 1]

    def last_words(self):
        return self.log()[-4000:]

    def wait_until(self, condition, what="", **options):
        """As wait_until(), for what comes only while the program runs."""
        def found():
            ended = self._process.poll() is not None  # the test itself has not looked
            if (value := condition()) or not ended:
                return value
            raise AssertionError(f"{self._process.args[0]} ended with {self.poll()} before this came: {what}\n{self.last_words()}")
        return wait_until(found, lambda: f"{what}\n{self.last_words()}", **options)

    def await_log(self, words, times=1):
        """Until the log has the words so many times."""
        self.wait_until(lambda: self.log().count(words) >= times, f"{words!r} in the log, {times} times")

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind=None, error=None, trace=None):
        if error is not None and not isinstance(error, unittest.SkipTest):
            print(f"The log of {self._command[0]}:\n{self.last_words()}", file=sys.stderr)
        with contextlib.suppress(AssertionError if error is not None else ()):
            self.close()

    def _refuse_unknown_end(self):
        if self._process is not None and not self._end_is_known and self._process.poll() is not None:
            raise AssertionError(f"{self._process.args[0]} has ended by itself, with {self._process.poll()}:\n{self.last_words()}")

    def close(self):
        """What the end of a test does, also where the program was not started."""
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._release)
            self._refuse_unknown_end()

    def _release(self):
        self.kill()
        for pipe in (self.stdin, self.stdout) if self._process else ():
            with contextlib.suppress(OSError):  # what was not written yet
                if pipe:
                    pipe.close()
