#!/usr/bin/python3
"""A flood of calls at the port by which replicas join takes few threads, and a replica that comes meanwhile joins.

  control_flood_test.py LOSSD [--seconds S] [--connections N]

Strangers open calls of GroupService.Join at replica 0, which each would take a thread, and reset them at once. Fails if the threads of
its process become more than MOST_MORE by that, if replica 1, which comes meanwhile, has not joined in the end (CTest's limit), or if
there was no flood.
"""
import argparse
import multiprocessing
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

from call_flood_test import LEAST_CALLS, flood
from lossd_server import free_port
from waiting import PATIENCE

from replica_servers import ReplicaServer, until, write_token

JOIN = "/lossd.group.v1.GroupService/Join"
# Those of calls (server/rpc/group/group_leader.cc), and some of gRPC's own.
MOST_MORE = 120


def threads_of(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(re.search(r"^Threads:\s+(\d+)", file.read(), re.MULTILINE)[1])


class MostThreads:
    """How many a process has at most while it is looked at."""

    def __init__(self, pid):
        self._pid, self._over = pid, threading.Event()
        self.most = self.before = threads_of(pid)
        self._thread = threading.Thread(target=self._look)

    def _look(self):
        while not self._over.wait(0.002):
            self.most = max(self.most, threads_of(self._pid))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def attack(args, folder):
    leader = f"127.0.0.1:{free_port()}"
    common = ["--replica_set=t", "--replicas=2", f"--replica_leader={leader}", f"--group_token_file={write_token(folder / 'token')}",
              "--workspace_bytes=16M"]
    first, second = (ReplicaServer(args.lossd, folder, number, common, devices="cpu") for number in (0, 1))
    try:
        first.begin()
        until(lambda: "did not join" in first.log() or not first.running())
        result = multiprocessing.Queue()
        process = multiprocessing.Process(target=flood,
                                          args=(leader, JOIN, lambda: None, "reset", args.seconds, args.connections, result),
                                          daemon=True)
        with MostThreads(first.pid) as threads:
            process.start()
            time.sleep(args.seconds / 2)
            second.begin()
            process.join(args.seconds + PATIENCE)
        for server in (first, second):
            server.await_serving()
        return result.get(timeout=PATIENCE)["calls"], threads.before, threads.most
    finally:
        for server in (first, second):
            server.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--seconds", type=float, default=15, help="how long the flood lasts")
    parser.add_argument("--connections", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls, before, most = attack(args, Path(folder))
    print(f"calls {calls}  threads before {before}  at most {most}")
    if calls < LEAST_CALLS:
        sys.exit(f"only {calls} calls were sent, which is no flood")
    if most - before > MOST_MORE:
        sys.exit(f"the flood made {most - before} threads, more than {MOST_MORE}")


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
