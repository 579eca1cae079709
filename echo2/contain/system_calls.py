"""The seccomp filter for foreign code: which system calls it is refused, as a program for the kernel.

Guarantees: a run under the filter cannot start processes, threads or programs, signal or trace others, open
sockets (except socket pairs within itself), or use memory that its limits do not count (shared and anonymous
files). Calls newer than the list get ENOSYS, so that a newer kernel opens no loophole; calls of another architecture kill. A pure
function of the machine's name. Leaves to others: installing it (runtime/inside), files and network (view).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from echo2.base.errors import ResourceError

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_FIRST_UNKNOWN = 463
_X32 = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name -> number on (x86_64, aarch64); -1: no such call on that machine.
REFUSED: Mapping[str, tuple[int, int]] = {
    # processes, threads, programs
    "clone": (56, 220), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    # other processes
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    # network
    "socket": (41, 198),
    # memory that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "quotactl": (179, 60),
    # the kernel's own machinery
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116), "fanotify_init": (300, 262),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "lookup_dcookie": (212, 18), "personality": (135, 92),
    "modify_ldt": (154, -1), "iopl": (172, -1), "ioperm": (173, -1), "sethostname": (170, 161),
    "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
}  # fmt: skip

# glibc falls back to clone, whose flags a filter can read, when clone3 is not there.
_ABSENT = {"clone3": (435, 435)}
_OWN_LIMITS_ONLY = {"prlimit64": (302, 261)}


def filter_program(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`. `machine`: as returned by `platform.machine()`."""
    if machine not in ARCHITECTURES:
        raise ResourceError(f"containment: expected a machine among {', '.join(ARCHITECTURES)}, got {machine}")
    column = list(ARCHITECTURES).index(machine)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_IF_EQUAL, ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [_step(_IF_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    steps += [_step(_IF_AT_LEAST, _FIRST_UNKNOWN, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    for numbers in _ABSENT.values():
        steps += [_step(_IF_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            steps += [_step(_IF_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ERRNO | _EPERM)]
    for numbers in _OWN_LIMITS_ONLY.values():
        steps += [
            _step(_IF_EQUAL, numbers[column], 0, 4),
            _step(_LOAD, _FIRST_ARGUMENT),
            _step(_IF_EQUAL, 0, 1, 0),
            _step(_RETURN, _ERRNO | _EPERM),
            _step(_RETURN, _ALLOW),
        ]
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
