#!/usr/bin/env python3
"""Runs a command the way a container of the image would: as another user, on a read-only root, with a network of its own.

It needs no container engine and no namespaces of users, which a chroot or a hardened machine refuses: it is run by root in new
namespaces of mounts, networks and processes:

    unshare --mount --net --ipc --uts --pid --fork --kill-child as_in_image.py IMAGE USER GROUP COMMAND [ARGUMENT...]

IMAGE is what deploy/image_files.sh laid out; COMMAND sees IMAGE/opt/lossd and, to write to, IMAGE/var/lib/lossd, over this
machine's root. Exit status: that of COMMAND.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def lay_out(root: Path, image: Path) -> None:
    mount("--rbind", "/", root)
    mount("--make-rprivate", root)  # what follows is seen nowhere else
    for folder, writable in (("opt/lossd", False), ("var/lib/lossd", True)):
        parent, place = (root / folder).parent, root / folder
        mount("-t", "tmpfs", "tmpfs", parent)
        place.mkdir()
        mount("--bind", image / folder, place)
        if not writable:
            mount("-o", "remount,ro,bind", place)
        mount("-o", "remount,ro,bind", parent)
    mount("-t", "proc", "proc", root / "proc")
    mount("-o", "remount,ro,bind", root)


def become(root: Path, user: int, group: int, command: list[str]) -> None:
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    os.execve(shutil.which(command[0], path="/usr/bin:/bin"), command, {"PATH": "/opt/lossd/bin:/usr/bin:/bin"})


def main() -> int:
    image, user, group, *command = sys.argv[1:]
    volume = Path(image) / "var/lib/lossd"
    owner = volume.stat()
    # The machine's own root lies there: whatever happens, this folder is unmounted and removed only if it is empty then,
    # never emptied.
    root = Path(tempfile.mkdtemp(prefix="lossd-root-"))
    try:
        bring_up_loopback()
        lay_out(root, Path(image).resolve())
        subprocess.run(["chown", "-R", f"{user}:{group}", volume], check=True)
        child = os.fork()
        if child == 0:
            try:
                become(root, int(user), int(group), command)
            finally:
                os._exit(127)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        subprocess.run(["chown", "-R", f"{owner.st_uid}:{owner.st_gid}", volume], check=False)
        subprocess.run(["umount", "--recursive", "--lazy", root], check=False)
        root.rmdir()


if __name__ == "__main__":
    sys.exit(main())
