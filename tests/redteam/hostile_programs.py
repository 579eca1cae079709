"""Hostile programs for whatever runs foreign code: each tries one thing, in several ways, and says what it achieved.

Each program prints `GOT` and what it got if it succeeded, and nothing with that word if not. `{secret}` is the path of a file
with the text SECRET outside the containment, `{port}` a port of this machine on which something listens, `{pid}` a
process outside, `{mark}` a path outside that must not come to be.
"""

import itertools
from collections.abc import Iterator

_OPENERS = (
    "open({path!r}).read()",
    "__import__('pathlib').Path({path!r}).read_text()",
    "__import__('os').read(__import__('os').open({path!r}, 0), 99).decode()",
    "__import__('mmap').mmap(__import__('os').open({path!r}, 0), 0, prot=1)[:].decode()",
    "__import__('linecache').getline({path!r}, 1)",
)
_ROUTES = (
    "{secret}", "/proc/self/root{secret}", "/proc/1/root{secret}", "/proc/{pid}/root{secret}", "/scratch/../..{secret}",
    "//{secret}",
)  # fmt: skip
_OTHER_SECRETS = (
    "/root/.ssh/id_ed25519", "/root/.bash_history", "/etc/shadow", "/etc/passwd", "/etc/hostname", "/proc/1/environ",
    "/proc/self/environ", "/proc/{pid}/environ", "/proc/{pid}/mem", "/proc/{pid}/maps", "/proc/kallsyms", "/dev/mem",
    "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/fuse", "/sys/kernel/notes", "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/var/run/docker.sock", "/run/systemd/private", "/var/lib/systemd/random-seed", "/home",
)  # fmt: skip
_LINKS = (
    "os.symlink({secret!r}, '/scratch/l'); print('GOT', open('/scratch/l').read())",
    "os.link({secret!r}, '/scratch/h'); print('GOT', open('/scratch/h').read())",
    "os.symlink('/', '/scratch/r'); print('GOT', open('/scratch/r' + {secret!r}).read())",
    "os.symlink({mark!r}, '/scratch/w'); open('/scratch/w', 'w').write('x'); print('GOT')",
    "os.chroot('/scratch'); print('GOT')",
    "d = os.open('/', 0); os.chroot('/scratch'); os.fchdir(d); os.chdir('..'); print('GOT', open({secret!r}).read())",
    "os.mknod('/scratch/disk', 0o60600, os.makedev(254, 0)); print('GOT', open('/scratch/disk', 'rb').read(9))",
    "os.rename('/usr', '/scratch/usr'); print('GOT')",
    "os.remove(__import__('json').__file__); print('GOT')",
    "open(__import__('json').__file__, 'a').write('#'); print('GOT')",
    "os.chmod(__import__('json').__file__, 0o777); print('GOT')",
    "open({mark!r}, 'w').write('x'); print('GOT')",
    "os.mkdir('/new'); print('GOT')",
    "open('/dev/shm/../new', 'w'); print('GOT')",
    "open('/etc/ld.so.preload', 'w'); print('GOT')",
)
_CONNECTS = (
    "socket.create_connection(('127.0.0.1', {port}), 1)",
    "socket.create_connection(('localhost', {port}), 1)",
    "socket.create_connection(('1.1.1.1', 53), 1)",
    "socket.create_connection(('169.254.169.254', 80), 1)",
    "socket.socket(socket.AF_INET6).connect(('::1', {port}))",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')",
    "socket.socket(socket.AF_UNIX).connect('\\0abstract')",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "socket.socket(socket.AF_VSOCK)",
    "socket.create_server(('127.0.0.1', 0))",
    "__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
    "__import__('http.client').client.HTTPConnection('127.0.0.1', {port}, timeout=1).connect()",
    "socket.getaddrinfo('example.org', 80)[0] and socket.create_connection(('example.org', 80), 1)",
    "__import__('asyncio').run(__import__('asyncio').open_connection('127.0.0.1', {port}))",
)
_PROCESSES = (
    "os.fork() or os._exit(0)",
    "os.forkpty()",
    "os.system('true') == 0 or 1/0",
    "os.popen('echo x').read() or 1/0",
    "__import__('subprocess').run(['/bin/true'], check=True)",
    "__import__('subprocess').run('true', shell=True, check=True)",
    "os.posix_spawn('/bin/true', ['true'], {{}})",
    "os.execv('/bin/echo', ['echo', 'GOT'])",
    "os.execve('/usr/bin/env', ['env'], {{}})",
    "__import__('multiprocessing').Process(target=print).start()",
    "__import__('concurrent.futures').futures.ProcessPoolExecutor(2).submit(abs, 1).result()",
    "__import__('threading').Thread(target=print).start()",
    "__import__('_thread').start_new_thread(print, ())",
    "__import__('pty').spawn('/bin/sh')",
    "libc.fork() >= 0 or 1/0",
    "libc.vfork() >= 0 or 1/0",
    "libc.system(b'true') == 0 or 1/0",
    "libc.daemon(0, 0) == 0 or 1/0",
    "os.kill(os.getppid(), 0)",
    "os.kill(os.getppid(), 9)",
    "os.kill(1, 9)",
    "os.kill(-1, 9)",
    "os.kill({pid}, 0)",
    "os.killpg(0, 19)",
    "signal.pthread_kill(__import__('threading').get_ident(), 0)",
    "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "os.sched_setaffinity(os.getppid(), {{0}})",
    "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    "resource.prlimit(os.getppid() or 1 / 0, resource.RLIMIT_CPU, (0, 0))",
    "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))",
    "os.setuid(0)",
    "os.setresuid(0, 0, 0)",
    "os.setgroups([0])",
    "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "os.memfd_create('x')",
    "os.sethostname('x') if hasattr(os, 'sethostname') else socket.sethostname('x')",
    "__import__('time').clock_settime(0, 0)",
    "os.fchdir(int('9'))",
)
# By number on x86_64: straight to the kernel, past Python and libc.
_CALLS = {
    "ptrace(ATTACH, parent)": "libc.ptrace(16, os.getppid(), 0, 0)",
    "ptrace(TRACEME)": "libc.ptrace(0, 0, 0, 0)",
    "ptrace(SEIZE, 1)": "libc.ptrace(0x4206, 1, 0, 0)",
    "process_vm_readv": "libc.process_vm_readv(os.getppid(), 0, 0, 0, 0, 0)",
    "process_vm_writev": "libc.process_vm_writev(1, 0, 0, 0, 0, 0)",
    "unshare(user)": "libc.unshare(0x10000000)",
    "unshare(mount)": "libc.unshare(0x20000)",
    "unshare(net)": "libc.unshare(0x40000000)",
    "setns": "libc.setns(0, 0)",
    "mount(proc)": "libc.mount(b'proc', b'/scratch', b'proc', 0, 0)",
    "mount(tmpfs)": "libc.mount(b'x', b'/scratch', b'tmpfs', 0, 0)",
    "remount rw": "libc.mount(b'x', b'/', 0, 4096 | 32, 0)",
    "umount": "libc.umount2(b'/usr', 2)",
    "pivot_root": "libc.syscall(155, b'/scratch', b'/scratch')",
    "personality": "libc.personality(0x0040000)",
    "bpf": "libc.syscall(321, 0, 0, 0)",
    "perf_event_open": "libc.syscall(298, 0, 0, -1, -1, 0)",
    "userfaultfd": "libc.syscall(323, 1)",
    "io_uring_setup": "libc.syscall(425, 1, ctypes.create_string_buffer(120))",
    "keyctl": "libc.syscall(250, 0, -3, 0)",
    "add_key": "libc.syscall(248, b'user', b'k', b'v', 1, -3)",
    "init_module": "libc.syscall(175, 0, 0, b'')",
    "kexec_load": "libc.syscall(246, 0, 0, 0, 0)",
    "reboot": "libc.syscall(169, 0xfee1dead, 672274793, 0, 0)",
    "open_by_handle_at": "libc.syscall(304, 0, 0, 0)",
    "clone(newuser)": "libc.syscall(56, 0x10000011, 0, 0, 0, 0)",
    "clone3": "libc.syscall(435, ctypes.create_string_buffer(88), 88)",
    "x32 fork": "libc.syscall(0x40000000 | 57)",
    "shmget": "libc.shmget(0, 1 << 30, 0o1600)",
    "memfd_secret": "libc.syscall(447, 0)",
    "seccomp off": "libc.prctl(22, 0, 0, 0, 0)",
    "new call": "libc.syscall(470, 0, 0, 0, 0)",
    "mlockall": "libc.mlockall(3) if False else libc.mlock(ctypes.create_string_buffer(1 << 22), 1 << 22)",
    "swapoff": "libc.swapoff(b'/swap')",
    "syslog": "libc.syscall(103, 3, ctypes.create_string_buffer(99), 99)",
}
# They want everything: time, memory, output, files. They end, whatever they do.
BOMBS = (
    "while True: pass",
    "x = 9 ** 9 ** 9",
    "x = [9]\nwhile True: x += x",
    "x = bytearray(64 << 30)",
    "x = 'a' * (1 << 40)",
    "import itertools; sum(1 for _ in itertools.count())",
    "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
    "def f(n): return f(n + 1)\nimport sys; sys.setrecursionlimit(1 << 30); f(0)",
    "eval('(' * 10000 + ')' * 10000)",
    "import ctypes; ctypes.string_at(0)",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "while True: print('x' * 99999, file=__import__('sys').stderr)",
    "import os\nwhile True: os.write(3, b'x' * 65536)",
    "import os; os.write(3, b'{\"problem\": ' + b'[' * 100000)",
    "import os; os.write(3, b'\\xff' * 1000); os._exit(0)",
    "import os; os.write(3, b'{\"problem\": ' + b'9' * 100000 + b'}'); os._exit(0)",
    "import os; os._exit(0)",
    "import os; os.abort()",
    "import os; [os.close(n) for n in range(64)]",
    "import os\nfor n in range(64):\n  try: os.dup2(0, n)\n  except OSError: pass",
    "f = open('/scratch/big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "import os\nfor n in range(1 << 30):\n  f = open('/scratch/%d' % n, 'wb')\n  f.write(b'x' * (1 << 20)); f.close()",
    "n = 0\nwhile True:\n  open('/scratch/f%d' % n, 'w').close(); n += 1",
    "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
    "import os; os.mkdir('/scratch/d'); open('/scratch/d/f', 'w'); os.chmod('/scratch/d', 0)",
    "import os\np = []\nwhile True: p.append(os.pipe())",
    "import socket\np = []\nwhile True: p.append(socket.socketpair())",
    "import mmap\np = []\nwhile True: p.append(mmap.mmap(-1, 1 << 28))",
    "import signal\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "import time; time.sleep(1000)",
    "import sys; sys.stdin.read(); input()",
    "import select; select.select([], [], [])",
    "class X:\n  def __del__(self):\n    while True: pass\nX()",
    "import atexit, time; atexit.register(time.sleep, 1000)",
    "raise BaseException('out')",
    "raise SystemExit(7)",
    "import gc; gc.disable()\nx = []\nwhile True: x = [x]",
    "import decimal; decimal.Decimal(9) ** 999999999",
    "str(10 ** 10 ** 7)",
    "import sys; sys.set_int_max_str_digits(0); print(len(str(7 ** 10 ** 8)))",
    "import zlib; d = zlib.decompressobj(); b = zlib.compress(bytes(1 << 26))\nx = b''\nwhile True: x += zlib.decompress(b)",
    "import json; json.loads('[' * 10 ** 7)",
    "import pickle; pickle.loads(b'\\x80\\x04\\x8c\\x02os\\x8c\\x06system\\x93\\x8c\\x04true\\x85R.')",
    "import sympy; sympy.factorial(10 ** 9)",
    "import numpy; numpy.ones((1 << 20, 1 << 20))",
)


# Signals that the kernel sends by itself, once it was told to whom: the parent, a guessed number, or a group of either.
_TELLS = (
    "fcntl.fcntl(a, fcntl.F_SETOWN, owner)",
    "libc.fcntl(a.fileno(), 15, struct.pack('ii', 0, owner))",  # F_SETOWN_EX: a thread, a process, a group
    "libc.fcntl(a.fileno(), 15, struct.pack('ii', 1, owner))",
    "libc.fcntl(a.fileno(), 15, struct.pack('ii', 2, abs(owner)))",
    "libc.ioctl(a.fileno(), 0x8901, struct.pack('i', owner))",  # FIOSETOWN
    "libc.ioctl(a.fileno(), 0x8902, struct.pack('i', owner))",  # SIOCSPGRP
)
_ASKS = (
    "fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | os.O_ASYNC)",
    "libc.ioctl(a.fileno(), 0x5452, struct.pack('i', 1))",  # FIOASYNC
)
_BY_DESCRIPTOR = """
import contextlib, ctypes, fcntl, os, socket, struct
libc = ctypes.CDLL(None)
for owner in [os.getppid(), -os.getppid(), os.getpgid(0), *range(1, 40), *range(-40, 0)]:
  a, b = socket.socketpair()
  with contextlib.suppress(OSError): TELL
  with contextlib.suppress(OSError): fcntl.fcntl(a, fcntl.F_SETSIG, SIGNAL)
  with contextlib.suppress(OSError): ASK
  b.send(b'x')
  with contextlib.suppress(OSError): b.send(b'x', socket.MSG_OOB)
  a.close(); b.close()
"""
_OTHER_SIGNALS = (
    "for pid in range(-9, 9): libc.kill(pid, 9)",
    "for tid in range(1, 40): libc.syscall(234, tid, tid, 9), libc.syscall(200, tid, 9)",
    "f = os.open('.', 0)\nfcntl.fcntl(f, fcntl.F_SETSIG, 9)\nfcntl.fcntl(f, fcntl.F_NOTIFY, 63 | 1 << 31)\nopen('f', 'w')",
    "f = os.open('f', os.O_CREAT)\nfcntl.fcntl(f, fcntl.F_SETSIG, 9)\nfcntl.fcntl(f, fcntl.F_SETLEASE, 1)\nopen('f')",
    "libc.prctl(1, 9)",
    """
for tid in range(1, 40):
  timer, event = ctypes.create_string_buffer(8), struct.pack('qiii44x', 0, 9, 4, tid)
  if not libc.syscall(222, 1, event, timer): libc.syscall(223, timer.raw[0], 0, struct.pack('qqqq', 0, 1, 0, 1), 0)
""",
    "libc.mq_notify(libc.mq_open(b'/q', 66, 0o600, 0), 0)",
    "os.setpgid(0, os.getpgid(os.getppid()) if os.getppid() else 0)\nos.killpg(0, 9)",
)


def programs_that_signal() -> Iterator[str]:
    """Programs that have the process around them killed or stopped, directly or by the kernel."""
    for tell, ask, number in itertools.product(_TELLS, _ASKS, (9, 19, 0)):
        yield _BY_DESCRIPTOR.replace("TELL", tell).replace("ASK", ask).replace("SIGNAL", str(number))
    for code in _OTHER_SIGNALS:
        yield f"import ctypes, fcntl, os, struct\nlibc = ctypes.CDLL(None)\n{code}"


def programs_that_leave_much() -> Iterator[str]:
    """Programs whose temporary folder is hard to empty: deep, wide, unreadable, full."""
    yield "import os\nfor n in range(20000): os.mkdir('d'); os.chdir('d')"
    yield "import os\nfor n in range(20000): os.mkdir('d%d' % n); os.chmod('d%d' % n, 0)"
    yield "import os\nfor n in range(2000): os.mkdir('d'); open('d/f', 'w').close(); os.chdir('d'); os.chmod('..', 0)"
    yield "import os\nfor n in range(20000): open('f%d' % n, 'w').close()"
    yield "import os\nopen('f', 'w').close()\nfor n in range(20000): os.link('f', 'l%d' % n)"
    yield "import os\nfor n in range(20000): os.symlink('x' * 4000, 'l%d' % n)"
    yield "import os\nos.chmod('.', 0)"
    yield "import os\nos.rename('/scratch', '/tmp2')"
    yield "f = open('/scratch/big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))"


def programs_that_want_something() -> Iterator[str]:
    """Programs that print GOT if they got what they must not have."""
    for opener, route in itertools.product(_OPENERS, _ROUTES):
        yield f"got = {opener.replace('{path!r}', repr(route))}\nif got: print('GOT', got)"
    for path in _OTHER_SECRETS:
        yield f"import os\nprint('GOT', os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}, 'rb').read(64))"
    for action in _LINKS:
        yield f"import os\n{action}"
    for action in _CONNECTS:
        yield f"import socket\n{action}\nprint('GOT')"
    for action in _PROCESSES:
        yield f"import ctypes, os, resource, signal, socket\nlibc = ctypes.CDLL(None)\n{action}\nprint('GOT')"
    for call in _CALLS.values():
        yield f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nif ({call}) >= 0: print('GOT')"
    # what the containment itself holds
    yield "import os\nfor n in range(4, 99):\n  try: os.fstat(n); print('GOT', n)\n  except OSError: pass"
    yield "import os\nif set(os.listdir('/proc') if os.path.exists('/proc') else []): print('GOT')"
    yield "import os\nif 'PLANTED' in str(os.environ): print('GOT')"
    yield "import os, glob\nif glob.glob('/**/identity.key', recursive=True): print('GOT')"
    yield "import os\nif os.listdir('/scratch'): print('GOT', os.listdir('/scratch'))\nopen('/scratch/left', 'w').write('x')"
    yield "import json, builtins\nif hasattr(json, 'planted'): print('GOT')\njson.planted = builtins.planted = 1"
    yield "import os\nif os.getppid() or os.getpgid(0) != os.getpid() or os.getsid(0) != os.getpid(): print('GOT')"
    yield "import ctypes\nif not ctypes.CDLL(None).unshare(0x20000): print('GOT')"
    yield "import os\nif os.getuid() == 0 or os.geteuid() == 0: print('GOT')"
