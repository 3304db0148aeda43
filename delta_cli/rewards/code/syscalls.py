"""Which system calls a sandboxed program may not make: a seccomp filter for bubblewrap, on Linux.

RLIMIT_AS bounds what one process maps. What it does not count is closed here: shared memory, message
queues and anonymous files outside any address space, and further processes with an address space of
their own. Namespaces inside the sandbox are closed too, and so are system calls that no response
needs and in which kernels had holes.
"""

from __future__ import annotations

import errno
import struct

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in the kernel's seccomp_data
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_THREAD = 0x10000
CLONE_NAMESPACES = 0x7E020080  # every CLONE_NEW… flag
X32 = 0x40000000  # a second table of x86-64, whose calls would pass under other numbers

# Name: number on x86-64 and on arm64 (None: that machine has no such call).
DENIED: dict[str, tuple[int | None, int | None]] = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447), "fork": (57, None),
    "vfork": (58, None), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "personality": (135, 92),
}  # fmt: skip
# Without bubblewrap there are no namespaces: signals to other processes, sockets, and prctl, which would undo that the
# program ends with its parent, are refused as well.
DENIED_ALONE: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "socket": (41, 198), "prctl": (157, 167),
}  # fmt: skip
CLONE = (56, 220)
CLONE3 = 435  # on both; its flags are out of a filter's sight, and the C library falls back to clone
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, the kernel's name


def seccomp_filter(machine: str, alone: bool = False) -> bytes | None:
    """The filter as the kernel reads it, for ``platform.machine()``; None if the numbers are not known.

    ``alone`` is for a program without any other sandbox.
    """
    if machine not in MACHINES:
        return None
    column, architecture = MACHINES[machine]
    refuse = (RETURN, 0, 0, ERROR | errno.EPERM)
    absent = (RETURN, 0, 0, ERROR | errno.ENOSYS)
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32), absent]
    for numbers in (DENIED | (DENIED_ALONE if alone else {})).values():
        number = numbers[column]
        if number is not None:
            program += [(EQUAL, 0, 1, number), refuse]
    program += [(EQUAL, 0, 1, CLONE3), absent]
    program += [(EQUAL, 0, 5, CLONE[column]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    program += [(ANY_BIT, 1, 0, CLONE_THREAD), refuse, (ANY_BIT, 0, 1, CLONE_NAMESPACES), refuse]
    program += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
