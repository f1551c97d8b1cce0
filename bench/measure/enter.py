"""Run a command with another directory as its root: `python3 enter.py ROOT COMMAND [ARGUMENT…]`, as root.

The command gets mount and process namespaces of its own, in which ROOT *is* the root (pivot_root), with /proc, /sys and
/dev. A chroot would not do: the kernel refuses new user namespaces in one, and Nix's sandbox calls pivot_root itself.
When the command ends or this process is killed, all its processes and mounts go with it. Exits with the command's
status, or 128 + the signal that ended it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
# glibc has no pivot_root().
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = kind.encode() if kind else None
    _check(libc.mount(source.encode(), target.encode(), encoded, flags, None), f"mount {source} on {target}")


def become_root(root: str) -> None:
    """Make `root` this process's root directory; the process must be alone in its mount namespace."""
    # Else what is mounted here would show up in, and outlive, the host's own namespace.
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount(root, root, None, MS_BIND | MS_REC)
    os.chdir(root)
    _mount("proc", "proc", "proc", 0)
    for name in ("sys", "dev"):
        _mount(f"/{name}", name, None, MS_BIND | MS_REC)
    # The old root lands on top of the new one, from where it is taken off: no folder of the new root is needed for it.
    _check(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def main(arguments: Sequence[str]) -> int:
    """Enter and run; never returns in the child."""
    root, command = os.path.realpath(arguments[0]), list(arguments[1:])
    _check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID), "unshare")
    child = os.fork()
    if child == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            become_root(root)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"enter: {error}", file=sys.stderr, flush=True)
            os._exit(3)
    # ctrl-C reaches the command by itself. Other signals do not end the first process of a namespace that has not asked
    # for them, so it is killed, and the kernel ends the rest.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python3 enter.py ROOT COMMAND [ARGUMENT...]")
    sys.exit(main(sys.argv[1:]))
