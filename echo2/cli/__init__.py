"""The commands echo2, echo-learner, echo-worker and echo-coordinator: the only place that wires the real parts together."""

import io
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what a user should know of a connection is said in our own words
# Its handlers abort or hang forks of a process that calls: the workers of a DataLoader beside a trainer of one's own.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
_IS_COMMAND = sys.argv[0].rpartition("/")[2] in ("echo2", "echo-learner", "echo-worker", "echo-coordinator")
if _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports that follow ends the command without a traceback; then `process.ended_by_interrupt` decides.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if _IS_COMMAND:
    # The next file that is opened would take the number of an output that was closed from the start: a database, say.
    while (nowhere := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
try:
    Path.home()
except RuntimeError:  # an account without a name, as in containers: what would lie in its home says where it cannot be
    os.environ["HOME"] = "/"
if _IS_COMMAND and isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a letter that the locale does not have ends no command
