"""What the kernel keeps foreign code from: the seccomp filter of its system calls, and namespaces of each run's own.

Guarantees of the filter: a run under it cannot start processes, threads or programs, signal or trace others, have the kernel send
signals, open sockets (except socket pairs within itself), or use memory that its limits do not count. Calls newer than the list
get ENOSYS, so that a newer kernel opens no loophole; calls of another architecture kill. Of the namespaces: a run has no number
for any other process; its temporary folder is a file system of bounded size, which the kernel drops whole after the run. Where
the machine refuses the calls (an AppArmor profile, a filter without setns, Linux before 5.8), runs share this process's
namespaces: it is the first process in them, to which the kernel delivers no signal from within that it does not handle; and the
container is thrown away whole after a run that left more than a few plain files.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from echo2.base.errors import ResourceError
from echo2.contain.messages import SCRATCH, Limits

# Errno.h; the filter answers what programs expect of a kernel without the call.
_EPERM, _EINVAL, _ENOTTY, _ENOSYS = 1, 22, 25, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # linux/seccomp.h
# Linux/bpf_common.h: BPF_LD|W|ABS, BPF_JMP with JEQ, JGE, JSET, BPF_RET.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8  # the lower half of an argument comes first
_FIRST_UNKNOWN = 463  # the first call of Linux 6.13 (setxattrat); the list ends with 6.12
_X32 = 0x40000000  # x86-64 also takes calls of its 32-bit ABI, whose numbers have this bit

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h: AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64

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
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "seccomp": (317, 277), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    # network
    "socket": (41, 198),
    # memory that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75),
    "io_setup": (206, 0),
    # the whole machine's disks
    "sync": (162, 81), "syncfs": (306, 267),
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

_CLONE3 = 435  # on both machines. Glibc falls back to clone, whose flags a filter can read, when clone3 is not there


@dataclass(frozen=True, slots=True)
class _Choice:
    """A call that is allowed only with these values of one argument (counted from 0), else `error`. Of the next argument, bits of
    `refused_bits` are refused where the value is `bits_of`."""

    numbers: tuple[int, int]
    argument: int
    allowed: tuple[int, ...]
    error: int
    bits_of: int = -1
    refused_bits: int = 0


# The rest of each names processes to signal, watches files, or changes what the kernel does.
_CHOICES: Mapping[str, _Choice] = {
    "prlimit64": _Choice((302, 261), 0, (0,), _EPERM),  # its own limits
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL but for O_ASYNC, F_GETLK, F_SETLK, F_SETLKW, the same as open file
    # descriptions, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
    "fcntl": _Choice((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032), _EPERM, 4, 0o20000),
    # FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; TCGETS, TCGETS2, TIOCGWINSZ: is it a terminal, how wide
    "ioctl": _Choice((16, 29), 1, (0x541B, 0x5421, 0x5450, 0x5451, 0x5401, 0x802C542A, 0x5413), _ENOTTY),
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_SET_VMA (glibc's names of memory)
    "prctl": _Choice((157, 167), 0, (3, 15, 16, 23, 0x53564D41), _EINVAL),
}


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
    for test, number in ((_IF_AT_LEAST, _FIRST_UNKNOWN), (_IF_EQUAL, _CLONE3)):
        steps += [_step(test, number, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            steps += [_step(_IF_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ERRNO | _EPERM)]
    for choice in _CHOICES.values():
        steps += _choice_steps(choice, choice.numbers[column])
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _choice_steps(choice: _Choice, number: int) -> list[bytes]:
    body = [_step(_LOAD, _ARGUMENTS + _ARGUMENT_BYTES * choice.argument)]
    if choice.refused_bits:
        body += [
            _step(_IF_EQUAL, choice.bits_of, 0, 4),
            _step(_LOAD, _ARGUMENTS + _ARGUMENT_BYTES * (choice.argument + 1)),
            _step(_IF_ANY_BIT, choice.refused_bits, 0, 1),
            _step(_RETURN, _ERRNO | choice.error),
            _step(_RETURN, _ALLOW),
        ]
    for value in choice.allowed:
        body += [_step(_IF_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW)]
    body += [_step(_RETURN, _ERRNO | choice.error)]
    return [_step(_IF_EQUAL, number, 0, len(body)), *body]


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


_NEW_PIDS, _NEW_MOUNTS = 0x20000000, 0x00020000  # linux/sched.h: CLONE_NEWPID, CLONE_NEWNS
_NO_SETUID, _NO_DEVICES, _DETACH = 2, 4, 2  # sys/mount.h: MS_NOSUID, MS_NODEV, MNT_DETACH
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h, version 3: two words of 32 capabilities
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LEFTOVERS_MAX = 64  # removing more would take the template's time; they end the container
_libc = ctypes.CDLL(None, use_errno=True)


class Namespaces:
    """Of the runs that this process forks. The constructor may leave a parent behind, which only waits for this process: the PID
    namespace that bubblewrap made belongs to a user namespace in which nobody inside has rights, so it takes another one.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._folder = Path.cwd()
        self._self = -1
        try:
            _call("unshare", _NEW_PIDS)
        except OSError:
            return
        _become_first()
        try:
            _call("unshare", _NEW_MOUNTS)
            self._self = os.pidfd_open(os.getpid())
            _call("setns", self._self, _NEW_PIDS)  # as after each fork
            if not _can_settle(self):
                self._self = -1
        except OSError:
            self._self = -1

    @property
    def are_own(self) -> bool:
        return self._self >= 0

    def fork(self) -> int:
        """As os.fork; the child is outside of this process's PID namespace, and must call `settle`."""
        if not self.are_own:
            # What this process left; what a run left was removed, or ended this process.
            for entry in list(os.scandir(SCRATCH)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry)
                else:
                    Path(entry).unlink()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those with a handler would arrive
            return os.fork()
        _call("unshare", _NEW_PIDS)  # for the next child, not for this process
        child = -1
        try:
            options = f"size={self._limits.scratch_bytes},nr_inodes={self._limits.scratch_files},mode=700"
            _call("mount", b"scratch", SCRATCH.encode(), b"tmpfs", _NO_SETUID | _NO_DEVICES, options.encode())
            child = os.fork()
        finally:
            if child != 0:
                _call("setns", self._self, _NEW_PIDS)
        return child

    def settle(self) -> None:
        """Called in the fork: leaves the forking process's session, enters the empty temporary folder, gives up all rights."""
        os.setsid()  # else signals to "my group" would go to the group outside
        if self.are_own:
            os.chdir(self._folder)
        else:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
        _call("capset", header, none)

    def clear(self) -> bool:
        """Called once a run has ended: whether the next one finds an empty temporary folder. If not, the container has to go."""
        if self.are_own:
            _call("umount2", SCRATCH.encode(), _DETACH)
            return True
        try:
            with os.scandir(SCRATCH) as entries:
                left = list(islice(entries, _LEFTOVERS_MAX + 1))
            if len(left) > _LEFTOVERS_MAX or any(entry.is_dir(follow_symlinks=False) for entry in left):
                return False
            for entry in left:
                Path(entry.path).unlink()
        except OSError:
            return False
        return True


def _become_first() -> None:
    """Goes on in a child that is the first process of its PID namespace; the parent ends as the child does."""
    child = os.fork()
    if child:
        os.closerange(0, 1 << 16)
        _, status = os.waitpid(child, 0)
        os._exit(min(1, status))
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _can_settle(namespaces: Namespaces) -> bool:
    child = namespaces.fork()
    if child == 0:
        status = 1
        try:
            namespaces.settle()
            status = os.getppid()  # 0: the parent has no number here
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0 and namespaces.clear()


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
