"""Runs inside the containment: creates the request handler once, then answers each request in a fork of its own.

Guarantees: foreign text is read only in a fork, which has its own namespaces, temporary folder and limits on CPU, memory, files
and output, is under the system-call filter before it reads the request, and is killed and reaped before its answer is passed
on. So a run reaches neither this process nor the next run, and its answer is bytes that nothing here interprets. Waits for: the
next request (end of file ends it) and, at most `wall_s`, for a fork.

With isolation "none" (rewards that the operator trusts), requests are answered in this process, with only the memory limit, and
what they print goes to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from echo2.base.errors import ResourceError
from echo2.contain.messages import LENGTH, SCRATCH, Ending, Limits, answer_frame, error_text

Body = Mapping[str, object]
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 1, 22, 38, 2  # linux/prctl.h, linux/seccomp.h
_CPU_SLACK_S = 0.2  # an end this near to the limit was caused by it: the kernel accounts in ticks
_SHUT_IN = b"\1"
"""A run's first byte, written before it reads anything foreign: without it, the machine failed and not the run."""
_PIECE = 1 << 16  # a pipe's capacity on Linux
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Handler:
    """`answer` runs in a fork and may read all of a request; `prepare` runs before the fork, outside the run's time limit, and
    must not interpret foreign text."""

    answer: Callable[[Body], bytes]
    prepare: Callable[[Body], object] = lambda body: None


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def serve(make: Callable[[str], Handler]) -> None:
    """Answers requests from stdin until its end. `make` creates the handler from the setup's text, which is trusted."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what a trusted reward starts would read requests from it
    os.dup2(2, 1)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (setup := _read(requests)) is None:
        return
    limits = Limits(**setup["limits"])  # type: ignore[arg-type] # written by our own process
    namespaces = Namespaces(limits) if setup["isolation"] == "fork" else None
    # CUDA and other languages' run times reserve far more addresses than they use, which trusted rewards may do.
    memory = resource.RLIMIT_DATA if namespaces is None else resource.RLIMIT_AS
    resource.setrlimit(memory, (limits.memory_bytes, limits.memory_bytes))
    try:
        handler = make(str(setup["setup"]))
    except Exception as error:  # noqa: BLE001 - reported to the process that asked for it
        needed = f"it needs more than {limits.memory_bytes >> 20} MiB of memory"  # for packages and data
        what = needed if isinstance(error, MemoryError) else error_text(error)
        _write(replies, answer_frame(Ending.FAULT, True, 0.0, what.encode(), b""))
        return
    if namespaces is not None:
        return _serve_in_forks(handler, limits, namespaces, requests, replies)
    _write(replies, answer_frame(Ending.ANSWERED, False, 0.0, b"", b""))
    while (request := _read(requests)) is not None:
        _write(replies, answer_frame(Ending.ANSWERED, False, 0.0, b"", handler.answer(_body(request))))


def _serve_in_forks(handler: Handler, limits: Limits, namespaces: Namespaces, requests: int, replies: int) -> None:
    filter_program(platform.machine())  # an unsupported machine fails here, before the first request
    gc.collect()
    gc.freeze()
    _write(replies, answer_frame(Ending.ANSWERED, False, 0.0, b"", b""))
    is_last = False
    while not is_last and (request := _read(requests)) is not None:
        with contextlib.suppress(Exception):  # the fork meets the error again and reports it
            handler.prepare(_body(request))
        cpu_s, wall_s = int(str(request["cpu_s"])), float(str(request["wall_s"]))
        try:
            answer = _run(handler, _body(request), limits, namespaces, cpu_s, wall_s)
            is_last = not namespaces.clear()
        except OSError as error:  # no process or namespace to be had
            answer, is_last = (Ending.FAULT, 0.0, error_text(error).encode(), b""), True
        ending, used_s, printed, body = answer
        _write(replies, answer_frame(ending, is_last, used_s, printed, body))


def _body(request: Body) -> Body:
    body = request["body"]
    assert isinstance(body, dict), "requests are our own"
    return body


# ---- one run


def _run(
    handler: Handler, body: Body, limits: Limits, namespaces: Namespaces, cpu_s: int, wall_s: float
) -> tuple[Ending, float, bytes, bytes]:
    """Runs one request in a fork; returns the ending, CPU seconds used, printed bytes and answer."""
    reply_out, reply_in = os.pipe()
    printed_out, printed_in = os.pipe()
    pid = namespaces.fork()
    if pid == 0:
        status = 1
        try:
            namespaces.settle()
            _confine(reply_in, printed_in, limits, cpu_s)
            _write(3, _SHUT_IN)
            _write(3, handler.answer(body))
            for output in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the run may have closed it, or put anything in its place
                    output.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(reply_in)
    os.close(printed_in)
    answered, printed, early = _drained(reply_out, printed_out, limits, time.monotonic() + wall_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(reply_out)
    os.close(printed_out)
    used_s = usage.ru_utime + usage.ru_stime
    if not answered.startswith(_SHUT_IN):
        return Ending.FAULT, used_s, printed, b""
    answered = answered.removeprefix(_SHUT_IN)
    ending = ending_of(early, status, bool(answered), used_s, cpu_s)
    return ending, used_s, printed, answered if ending is Ending.ANSWERED else b""


def ending_of(early: Ending | None, status: int, has_answer: bool, used_s: float, cpu_s: int) -> Ending:
    """`early`: the limit for which the fork was killed from here; `status`: how it ended, as os.wait4 says. On a virtual
    machine whose time is stolen, the kernel may send SIGXCPU before the time that it reports reaches the limit."""
    if early is Ending.OUTPUT_USED_UP:
        return early
    if early is None and status == 0 and has_answer:
        return Ending.ANSWERED
    is_ended_by_limit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    if is_ended_by_limit or used_s >= cpu_s - _CPU_SLACK_S:
        return Ending.CPU_USED_UP
    return early or Ending.DIED


def _drained(reply: int, printed: int, limits: Limits, deadline: float) -> tuple[bytes, bytes, Ending | None]:
    """Reads both pipes until the fork closes them, or until a limit is reached; returns that limit's ending."""
    buffers = {reply: bytearray(), printed: bytearray()}
    room = {reply: limits.answer_bytes + len(_SHUT_IN), printed: limits.printed_bytes_max}
    waiting = select.poll()
    for pipe in buffers:
        waiting.register(pipe, select.POLLIN)
    is_open = set(buffers)
    early: Ending | None = None
    while is_open and early is None:
        left_s = deadline - time.monotonic()
        ready = waiting.poll(left_s * 1000) if left_s > 0 else []
        if not ready:
            early = Ending.TIMED_OUT
        for pipe, _ in ready:
            piece = os.read(pipe, _PIECE)
            room[pipe] -= len(piece)
            if not piece:
                waiting.unregister(pipe)
                is_open.discard(pipe)
            elif room[pipe] < 0:
                early = Ending.OUTPUT_USED_UP
            elif pipe == reply or len(buffers[pipe]) < limits.printed_bytes:
                buffers[pipe] += piece
    return bytes(buffers[reply]), bytes(buffers[printed][: limits.printed_bytes]), early


def _confine(reply: int, printed: int, limits: Limits, cpu_s: int) -> None:
    """Called in the fork: sets descriptors, limits and the filter. Irreversible."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    reply, printed = os.dup(reply), os.dup(printed)  # above 3, so that no dup2 below overwrites another
    for here, there in ((nothing, 0), (printed, 1), (printed, 2), (reply, 3)):
        os.dup2(here, there)
    os.closerange(4, 1 << 16)
    # SIGXCPU at the limit; the first process of a namespace ignores it, and others may handle it: so SIGKILL a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for which, bound in (
        (resource.RLIMIT_FSIZE, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files_max),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(which, (bound, bound))
    steps = filter_program(platform.machine())
    program = _Program(len(steps) // 8, steps)
    is_refused = _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if is_refused or _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the filter of system calls could not be installed")


# ---- frames


def _read(pipe: int) -> dict[str, object] | None:
    if (head := _exactly(pipe, LENGTH.size)) is None or (payload := _exactly(pipe, LENGTH.unpack(head)[0])) is None:
        return None
    message = json.loads(payload)
    assert isinstance(message, dict), "frames hold JSON objects"
    return message


def _exactly(pipe: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = os.read(pipe, min(count - len(data), _PIECE))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view[:_PIECE]) :]


# ---- what the kernel keeps foreign code from: the filter of its system calls, and namespaces of each run's own
#
# Guarantees of the filter: a run under it cannot start processes, threads or programs, signal or trace others, have the kernel
# send signals, open sockets (except socket pairs within itself), or use memory that its limits do not count. Calls newer than the
# list get ENOSYS, so that a newer kernel opens no loophole; calls of another architecture kill. Of the namespaces: a run has no
# number for any other process; its temporary folder is a file system of bounded size, which the kernel drops whole after the run.
# Where the machine refuses the calls (an AppArmor profile, a filter without setns, Linux before 5.8), runs share this process's
# namespaces: it is the first process in them, to which the kernel delivers no signal from within that it does not handle; and the
# container is thrown away whole after a run that left more than a few plain files.

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
_LEFTOVERS_MAX = 64  # removing more would take the template's time; they end the container


class Namespaces:
    """Of the runs that this process forks. The constructor may leave a parent behind, which only waits for this process: the
    PID namespace that bubblewrap made belongs to a user namespace in which nobody inside has rights, so it takes another one."""

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
