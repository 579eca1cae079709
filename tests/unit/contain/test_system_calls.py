"""The filter of system calls, run as the kernel runs it."""

import os
import re
import struct
from pathlib import Path

import pytest

from echo2.base.errors import ResourceError
from echo2.contain.inside import _FIRST_UNKNOWN, ARCHITECTURES, REFUSED, filter_program

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def verdict(machine: str, number: int, architecture: int | None = None, arguments: tuple[int, ...] = ()) -> int:
    """What the filter says of a call: a classic BPF machine of the six instructions that it uses."""
    said = ARCHITECTURES[machine] if architecture is None else architecture
    memory = struct.pack("<IIQ6Q", number, said, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = [struct.unpack("=HBBI", step) for step in _pieces(filter_program(machine))]
    place, accumulator = 0, 0
    while True:
        code, if_true, if_false, operand = steps[place]
        place += 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("<I", memory, operand)[0]
            case 0x15:
                place += if_true if accumulator == operand else if_false
            case 0x35:
                place += if_true if accumulator >= operand else if_false
            case 0x45:
                place += if_true if accumulator & operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(code)


def _pieces(program: bytes) -> list[bytes]:
    return [program[start : start + 8] for start in range(0, len(program), 8)]


@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_what_is_listed_is_refused_and_what_python_needs_is_not(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    refused = {numbers[column] for numbers in REFUSED.values() if numbers[column] >= 0}
    for number in refused:
        assert verdict(machine, number) == ERRNO | 1
    needed = {
        "x86_64": (0, 1, 3, 9, 11, 12, 13, 53, 60, 202, 231, 257),
        "aarch64": (56, 57, 63, 64, 93, 94, 98, 199, 222),
    }
    for number in needed[machine]:  # read, write, close, mmap, brk, sigaction, socketpair, exit, futex, openat
        assert verdict(machine, number) == ALLOW


@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_other_machines_calls_kill_and_unknown_ones_are_absent(machine: str) -> None:
    assert verdict(machine, 1, architecture=0x40000003) == KILL, "a 32-bit call"
    assert verdict(machine, 435) == ERRNO | 38, "clone3: glibc then asks for clone"
    for number in (_FIRST_UNKNOWN, 500, 0x3FFFFFFF):
        assert verdict(machine, number) == ERRNO | 38
    if machine == "x86_64":
        assert verdict(machine, 0x40000000 | 57) == KILL, "fork by its x32 number"
    with pytest.raises(ResourceError, match="expected a machine among x86_64, aarch64, got riscv64"):
        filter_program("riscv64")


@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_of_calls_that_do_many_things_only_the_harmless_are_allowed(machine: str) -> None:
    fcntl, ioctl, prctl, limit = {"x86_64": (72, 16, 157, 302), "aarch64": (25, 29, 167, 261)}[machine]
    for number, arguments in (
        (fcntl, (3, 1)), (fcntl, (3, 1030)), (fcntl, (3, 4, os.O_NONBLOCK)), (ioctl, (1, 0x5401)), (prctl, (15,)), (limit, (0,)),
    ):  # fmt: skip
        assert verdict(machine, number, arguments=arguments) == ALLOW
    assert verdict(machine, limit, arguments=(7,)) == ERRNO | 1, "another process's limits"
    # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
    for command in (8, 10, 15, 1024, 1026, 1031, 4242):
        assert verdict(machine, fcntl, arguments=(3, command)) == ERRNO | 1
    assert verdict(machine, fcntl, arguments=(3, 4, os.O_NONBLOCK | os.O_ASYNC)) == ERRNO | 1
    assert verdict(machine, fcntl, arguments=(3, 8 | 1 << 32)) == ERRNO | 1, "the kernel reads the lower half"
    for command in (0x8901, 0x8902, 0x5452, 0x5410, 0x5412):  # FIOSETOWN, SIOCSPGRP, FIOASYNC, TIOCSPGRP, TIOCSTI
        assert verdict(machine, ioctl, arguments=(3, command)) == ERRNO | 25
    for option in (1, 4, 22, 38, 59):  # PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS, SYSCALL_USER_DISPATCH
        assert verdict(machine, prctl, arguments=(option,)) == ERRNO | 22


def test_the_numbers_are_those_of_the_kernels_headers() -> None:
    places = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
    for column, machine in enumerate(ARCHITECTURES):
        header = Path(places[machine])
        if not header.exists():
            pytest.skip(f"{header} is not installed here")
        named = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
        for name, numbers in REFUSED.items():
            if name in named:
                assert numbers[column] == int(named[name]), name
