"""Start a program under a unit's system call rules: what of systemd's sandbox a build can set up without being root.

    python confine.py TOOLS UNIT PROGRAM [ARGUMENT...]

TOOLS has systemd-analyze, which knows the sets of calls, and libseccomp, which makes the filter. Of the unit,
SystemCallFilter, SystemCallErrorNumber, RestrictAddressFamilies, RestrictNamespaces and NoNewPrivileges count.
"""

import ctypes
import errno
import os
import socket
import subprocess
import sys

ALLOW = 0x7FFF0000
PR_SET_NO_NEW_PRIVS = 38
FAMILIES = 64  # more than Linux has
# Comparisons of libseccomp's enum scmp_compare.
EQUAL, AT_LEAST, MASKED_EQUAL = 4, 5, 7
CLONE_NAMESPACES = {"cgroup": 1 << 25, "ipc": 1 << 27, "net": 1 << 30, "mnt": 1 << 17, "pid": 1 << 29, "user": 1 << 28,
                    "uts": 1 << 26}  # fmt: skip


def error(number: int) -> int:
    """seccomp's action that makes a call fail with that errno."""
    return 0x00050000 | number


class Argument(ctypes.Structure):
    """struct scmp_arg_cmp: a condition on one argument of a call."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def values(unit: str, key: str) -> list[str]:
    """The words of a key of [Service], over all its lines."""
    with open(unit) as file:
        lines = [line.strip().partition("=") for line in file]
    return [word for name, _, value in lines if name == key for word in value.split()]


def calls_of(tools: str, name: str) -> set[str]:
    """The calls in a set such as @system-service, those of the sets in it included."""
    if not name.startswith("@"):
        return {name}
    result = subprocess.run(
        [f"{tools}/bin/systemd-analyze", "syscall-filter", "--no-pager", name],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    members = [line.strip() for line in result.stdout.splitlines() if line.startswith(" ") and "#" not in line]
    return set().union(*(calls_of(tools, member) for member in members))


class Filter:
    """A seccomp filter of this machine's own architecture."""

    def __init__(self, tools: str, otherwise: int) -> None:
        self._library = ctypes.CDLL(f"{tools}/lib/libseccomp.so.2", use_errno=True)
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._library.seccomp_rule_add_array.argtypes = (
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(Argument),
        )  # fmt: skip
        self._library.seccomp_load.argtypes = (ctypes.c_void_p,)
        self._context = self._library.seccomp_init(ctypes.c_uint32(otherwise))
        self._otherwise = otherwise

    def add(self, action: int, call: str, *conditions: Argument) -> None:
        number = self._library.seccomp_syscall_resolve_name(call.encode())
        # Below zero: a call of other architectures, or one that this libseccomp does not know.
        if number < 0 or action == self._otherwise:
            return
        array = (Argument * max(1, len(conditions)))(*conditions)
        code = self._library.seccomp_rule_add_array(self._context, action, number, len(conditions), array)
        if code:
            sys.exit(f"seccomp rule for {call}: {os.strerror(-code)}")

    def load(self) -> None:
        if code := self._library.seccomp_load(self._context):
            sys.exit(f"seccomp filter: {os.strerror(-code)}")


def filter_calls(tools: str, unit: str) -> None:
    words = values(unit, "SystemCallFilter")
    if not words:
        sys.exit(f"{unit} has no SystemCallFilter")
    allowed = set().union(*(calls_of(tools, word) for word in words if not word.startswith("~")))
    for word in words:
        if word.startswith("~"):
            allowed -= calls_of(tools, word[1:])
    (refusal,) = values(unit, "SystemCallErrorNumber")
    # As systemd does it: a call that it has not heard of does not exist, which a C library knows how to live with.
    filter = Filter(tools, error(errno.ENOSYS))
    for call in sorted(calls_of(tools, "@known")):
        filter.add(ALLOW if call in allowed else error(getattr(errno, refusal)), call)
    filter.load()


def filter_families(tools: str, unit: str) -> None:
    """socket() for the families listed alone; seccomp takes the strictest of all filters."""
    families = [int(getattr(socket, name)) for name in values(unit, "RestrictAddressFamilies")]
    filter = Filter(tools, ALLOW)
    refusal = error(errno.EAFNOSUPPORT)
    for family in range(FAMILIES):
        if family not in families:
            filter.add(refusal, "socket", Argument(0, EQUAL, family, 0))
    filter.add(refusal, "socket", Argument(0, AT_LEAST, FAMILIES, 0))
    filter.load()


def filter_namespaces(tools: str, unit: str) -> None:
    if values(unit, "RestrictNamespaces") != ["yes"]:
        sys.exit(f"{unit} does not restrict namespaces")
    filter = Filter(tools, ALLOW)
    for flag in CLONE_NAMESPACES.values():
        for call in ("clone", "unshare"):
            filter.add(error(errno.EPERM), call, Argument(0, MASKED_EQUAL, flag, flag))
    filter.add(error(errno.EPERM), "setns")
    # Its flags are behind a pointer, where no filter sees them: without clone3, a C library uses clone.
    filter.add(error(errno.ENOSYS), "clone3")
    filter.load()


def main() -> None:
    tools, unit, *command = sys.argv[1:]
    if values(unit, "NoNewPrivileges") != ["yes"]:
        sys.exit(f"{unit} does not set NoNewPrivileges")
    if ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        sys.exit("prctl(PR_SET_NO_NEW_PRIVS) failed")
    filter_families(tools, unit)
    filter_namespaces(tools, unit)
    filter_calls(tools, unit)
    os.execv(command[0], command)


main()
