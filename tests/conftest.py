"""One profile for property tests: a busy machine must not fail them by being slow.

One thread for each process's numbers: tests run side by side, and OpenMP's threads that wait for one another on cores that others
use do so by spinning. The engine's tests took four times as long.
"""

import functools
import inspect
import logging
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, and for the processes that tests start

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.fork_server import OWNER
from tests.loops import OwnLoop, VirtualTime

PHASES = [phase for phase in Phase if phase is not Phase.shrink or "ECHO2_NO_SHRINK" not in os.environ]
settings.register_profile("echo2", deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=PHASES)
settings.load_profile("echo2")


LONG_FIRST = (
    "tests/e2e/test_run", "tests/redteam/test_ports", "tests/packaging", "tests/unit/learner/test_rank", "tests/e2e",
    "tests/unit/learner/test_own_trainer", "tests/unit/sim",
    "tests/unit/cli/test_plan", "tests/contract/test_engine", "tests/unit/learner/test_audit", "tests/redteam",
    "tests/contract",
)  # fmt: skip
"""Files that take longest, in this order: begun last, one of them would keep all others waiting at the end."""


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command run in this process sets up the log, on a stream that ends with its test: the next finds it as it was."""
    log = logging.getLogger("echo2")
    handlers, level, is_passed_on, last = log.handlers[:], log.level, log.propagate, logging.lastResort
    yield
    log.handlers[:], log.propagate, logging.lastResort = handlers, is_passed_on, last
    log.setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on the loop that a fixture of it is, or on one of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    loops = (fixture for fixture in pyfuncitem.funcargs.values() if isinstance(fixture, OwnLoop))
    next(loops, OwnLoop()).run(functools.partial(pyfuncitem.obj, **arguments))
    return True


@pytest.fixture
def virtual_time() -> OwnLoop:
    return VirtualTime()


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Two processes more than there are cores, four at most: much of what the tests take is waiting."""
    return min((os.cpu_count() or 1) + 2, 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((at for at, start in enumerate(LONG_FIRST) if item.nodeid.startswith(start)), len(LONG_FIRST))

    items.sort(key=rank)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in each process of pytest-xdist
        os.environ[OWNER] = str(os.getpid())


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """The codec is compiled once before all tests: beside the collection, where processes of pytest-xdist collect."""
    if not hasattr(session.config, "workerinput"):
        from echo2.cli.demo.model import warm_once  # imports torch

        warm_once()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that died or a file that did not load is no failed test, which `make test` would try once more (exit status 1)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())] if reporter else []
    if any(report.when not in {"setup", "call", "teardown"} for report in reports):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
