"""What a machine can forbid a process, made on purpose. For programs that tests start: none of it can be undone."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

NOBODY = 65534
IO_URING_SETUP, IO_URING_ENTER = 425, 426  # the same on all architectures

_libc = ctypes.CDLL(None, use_errno=True)


def _done(returned: int) -> None:
    if returned != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def forbid(call: int) -> None:
    """From now on the kernel answers this system call with EPERM, as container runtimes make it."""
    load, equal, answer = 0x20, 0x15, 0x06
    refuse, allow = 0x0005_0001, 0x7FFF_0000
    steps = [(load, 0, 0, 0), (equal, 0, 1, call), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    _done(_libc.prctl(no_new_privileges, 1, 0, 0, 0))
    _done(_libc.prctl(seccomp, by_filter, program, 0, 0))


def own_file_system(at: Path, options: str) -> None:
    """A file system in memory over ``at``, seen by this process only. Where that is not allowed, the program says so and ends."""
    try:
        _own_file_system(at, options)
    except PermissionError as error:
        print("not allowed here:", error)
        sys.exit()


def _own_file_system(at: Path, options: str) -> None:
    new_mounts, new_users = 0x0002_0000, 0x1000_0000
    uid, gid = os.getuid(), os.getgid()
    _done(_libc.unshare(new_mounts if uid == 0 else new_mounts | new_users))
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    private, recursive = 1 << 18, 1 << 14
    _done(_libc.mount(None, b"/", None, private | recursive, None))
    _done(_libc.mount(b"tmpfs", os.fsencode(at), b"tmpfs", 0, options.encode()))


def make_read_only(at: Path, yes: bool = True) -> None:
    """Makes the file system of :func:`own_file_system` read-only, or writable again."""
    remount, read_only = 32, 1
    _done(_libc.mount(None, os.fsencode(at), None, remount | read_only * yes, None))


def become_nobody() -> None:
    """Gives up being root, which few limits hold for. Modules must have been imported before."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
