"""System calls that are forbidden in a jail, by a filter of the kernel (seccomp(2)).

They access memory that is not limited (System V's, files without a name), keys of the user who started the
jail, other processes, or parts of the kernel that programs do not need. Sockets are restricted to the
families that a network namespace isolates. Other families, such as AF_VSOCK, access the host of a virtual
machine. The numbers are from asm/unistd.h and bits/socket.h.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

__all__ = ["forbid", "is_known_machine", "require_known_machine"]

# By machine: number of the architecture in the kernel; numbers of shmget, shmat, shmctl, semget, msgget,
# ptrace, mount, umount2, pivot_root, chroot, add_key, request_key, keyctl, unshare, setns, perf_event_open,
# process_vm_readv, process_vm_writev, bpf, userfaultfd, memfd_create, io_uring_setup; clone; socket,
# socketpair.
_X86 = "29 30 31 64 68 101 165 166 155 161 248 249 250 272 308 298 310 311 321 323 319 425"
_ARM = "194 196 195 190 186 117 40 39 41 51 217 218 219 97 268 241 270 271 280 282 279 425"
_MACHINES = {
    "x86_64": (0xC000003E, tuple(map(int, _X86.split())), 56, (41, 53)),
    "aarch64": (0xC00000B7, tuple(map(int, _ARM.split())), 220, (198, 199)),
}
_CLONE3 = 435
_NAMESPACES = 0x7E020000  # flags of clone that create a namespace
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_OTHER_TABLE = 0x40000000  # x32: the same calls with other numbers
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data; an argument's lower half
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_SET_SECCOMP, _FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_known_machine() -> bool:
    """Return True if the numbers of this machine's system calls are known."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def require_known_machine() -> None:
    """Refuse a machine whose system calls cannot be filtered.

    Raises:
        OSError: the numbers of its system calls are not known.
    """
    if not is_known_machine():
        seen, allowed = f"{sys.platform} on {platform.machine()}", f"linux on {' or '.join(_MACHINES)}"
        raise OSError(errno.ENOSYS, f"filter of system calls: got {seen}; allowed: {allowed}")


def forbid() -> None:
    """Forbid the system calls for this process and its children. Privileges must be given up before.

    Raises:
        OSError: the machine is unknown, or the kernel refuses the filter.
    """
    require_known_machine()
    machine, numbers, clone, (one_socket, two_sockets) = _MACHINES[platform.machine()]
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_TABLE),
        (_RETURN, 0, 0, _KILL),
        # The flags of clone3 are in memory, which a filter cannot read. Libraries then use clone instead.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for number in numbers:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    by_family = [
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)),
        # The error of a family that the kernel does not support.
        (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    steps += [(_EQUAL, 1, 0, one_socket), (_EQUAL, 0, len(by_family), two_sockets), *by_family]
    steps += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NAMESPACES),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), packed)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "seccomp")
