"""One lease as the worker sees it: the rollouts of its group and their progress."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from echo2.base.ids import LeaseId
from echo2.base.rollout import GroupSpec
from echo2.worker.partial import PartialRollout


class LeasePhase(enum.Enum):
    FETCHING = "waits for the partial rollouts"
    RUNNING = "generates"
    HANDING_BACK = "hands back"


@dataclass(slots=True)
class LeaseWork:
    lease_id: LeaseId
    group: GroupSpec
    deadline: float
    margin_s: float
    phase: LeasePhase
    rollouts: dict[int, PartialRollout]
    report_due: float
    is_reporting: bool = False
    end_message: str = ""

    @property
    def is_settled(self) -> bool:
        return self.phase is not LeasePhase.FETCHING and all(rollout.is_settled for rollout in self.rollouts.values())

    @property
    def is_handed_back(self) -> bool:
        return all(r.is_settled or (r.is_stopped and not r.has_news) for r in self.rollouts.values())

    @property
    def has_news(self) -> bool:
        return any(rollout.has_news for rollout in self.rollouts.values())

    @property
    def has_finished_news(self) -> bool:
        return any(rollout.has_news and rollout.is_ended for rollout in self.rollouts.values())

    @property
    def is_running(self) -> bool:
        return any(not rollout.is_stopped and not rollout.is_settled for rollout in self.rollouts.values())

    @property
    def running(self) -> int:
        """Number of its sequences that the engine has or will get."""
        return sum(1 for rollout in self.rollouts.values() if not rollout.is_stopped and not rollout.is_settled)
