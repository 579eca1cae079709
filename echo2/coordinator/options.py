"""Options of one coordinator process: the run file's sections as they are, and what only this process knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from echo2.base.ids import RunId
from echo2.config.run import CoordinatorSection, RunConfig

# The section's rules of timing, which `timed_section` overrides.
TIMING = ("heartbeat_interval", "suspect_after", "gone_after", "lease_timeout", "report_interval", "plan_interval")


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """`folder`: the run's folder, for state and join links. `config`: a coordinator reads its sections coordinator, run, staleness,
    model, worker (whether weights may be rounded) and learner (steps). `exit_when_finished`: the process exits once the learner has
    finished, all workers have gone and all rented machines are released; else the page stays up. `takes_free_ports`: a port that is
    taken is replaced by any free one."""

    folder: Path
    config: RunConfig = field(default_factory=RunConfig)
    exit_when_finished: bool = False
    takes_free_ports: bool = False

    @property
    def run_id(self) -> RunId:
        return RunId(self.config.run.name)

    @property
    def link_host(self) -> str:
        """The host named in join links and in the replies that carry certificates."""
        host = (self.config.coordinator.advertise or self.config.coordinator.host).strip("[]")
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)


def timed_section(**values: Any) -> CoordinatorSection:
    """A section with these options and `TIMING`, for simulated time, benchmarks and tests."""
    timing = {name: values.pop(name) for name in TIMING if name in values}
    fixed = {"__annotations__": dict.fromkeys(timing, ClassVar[float]), "__module__": __name__, **timing}
    section: CoordinatorSection = type("TimedSection", (CoordinatorSection,), fixed)(**values)
    return section
