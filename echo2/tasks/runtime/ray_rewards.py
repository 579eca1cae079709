"""Computes rewards on a Ray cluster: each slot of the pool is an actor on some machine, which runs one contained process.

Guarantees: an actor contains rewards as this machine would, by its own machine's bubblewrap, or takes no request; if a machine is
lost, its request is retried elsewhere; a request that lost several machines is a machinery fault, so its rollout gets no reward,
never 0. Waits for: a machine with a free CPU, logging a warning every TOLD_S; an answer, at most as long as a request may take.
Leaves to others: order and fairness among requests (contain/runtime/pool), access to the cluster (its operator: Ray does not
authenticate, so its ports belong on a private network).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from echo2.base.errors import ConfigError
from echo2.contain.limits import Answer
from echo2.contain.messages import shown
from echo2.contain.runtime.pool import RunnerLost
from echo2.contain.runtime.sandbox import GRACE_S, Sandbox
from echo2.tasks.runtime.rewards import Containment, RewardLimits, bounds_of, launch_of
from echo2.tasks.task import TaskSpec

PROCESSES_MAX = 256
LOOK_S, TOLD_S = 1.0, 60.0
_connecting = threading.Lock()
_log = logging.getLogger("echo2.rewards")


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ConfigError(f"task.ray: expected the package ray (pip install 'echo2[ray]'), got: {error}") from None
    return ray


def _connected(address: str) -> Any:
    ray = _ray()
    with _connecting:
        if not ray.is_initialized():
            try:
                ray.init(address, namespace="echo2", log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"task.ray: expected a Ray cluster at {address}, got: {error}") from None
    return ray


def processes_of_cluster(address: str) -> int:
    """Returns one per CPU of the cluster, at most PROCESSES_MAX. Raises ConfigError if it is unreachable or has no CPU."""
    cpus = int(_connected(address).cluster_resources().get("CPU", 0))
    if cpus < 1:
        raise ConfigError(f"task.ray: expected a Ray cluster with CPUs at {address}, it offers none")
    return min(PROCESSES_MAX, cpus)


class RayScorer:
    """The actor, on the machine that Ray selected."""

    def __init__(self, spec: TaskSpec, limits: RewardLimits, containment: Containment) -> None:
        self._sandbox = Sandbox(launch_of(spec, limits, containment))

    def ready(self) -> None:
        """Returns once the actor is constructed, which fails on a machine that cannot contain rewards."""

    def ask(self, body: Mapping[str, object], times: int) -> Answer:
        return self._sandbox.ask(body, times)


class RayRunner:
    """A runner of `Pool` that holds one actor at a time. The cluster must be connected already."""

    def __init__(self, spec: TaskSpec, limits: RewardLimits, containment: Containment) -> None:
        self._told = spec, limits, containment
        self._bounds = bounds_of(limits)
        self._actor: Any = None

    def prepare(self, is_wanted: Callable[[], bool]) -> bool:
        """Waits for a machine with a free CPU before a request is taken from the queue. Returns False once `is_wanted` does."""
        if self._actor is not None:
            return True
        ray, waited_s, problem = _ray(), 0.0, "it has no CPU free"
        ready: Any = None
        while is_wanted():
            try:
                if ready is None:
                    made = ray.remote(RayScorer).options(num_cpus=1, scheduling_strategy="SPREAD", max_restarts=0)
                    self._actor = made.remote(*self._told)
                    ready = self._actor.ready.remote()
                done, _ = ray.wait([ready], timeout=LOOK_S)
                if done:
                    ray.get(ready)
                    return True
            except ray.exceptions.RayError as error:
                problem, ready = shown(error), None
                self.kill()
                threading.Event().wait(LOOK_S)
            waited_s += LOOK_S
            if waited_s >= TOLD_S:
                waited_s = 0.0
                _log.warning("a reward process waits for a machine of the Ray cluster: %s", problem)
        return False

    def ask(self, body: Mapping[str, object], times: int = 1) -> Answer:
        ray = _ray()
        limit_s = self._bounds.wall_s * times + 2 * GRACE_S + self._bounds.start_s
        try:
            answer: Answer = ray.get(self._actor.ask.remote(dict(body), times), timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            self.kill()
            raise RunnerLost(f"no answer of a machine of the Ray cluster within {limit_s:.0f} s") from None
        except ray.exceptions.RayError as error:
            self.kill()
            raise RunnerLost(shown(f"its machine of the Ray cluster is gone: {error}")) from None
        return answer

    def kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            _ray().kill(actor)
