"""`echo2 plan --live RUN` and `--history RUN`: what to do next with a running run, and how its predictions came out.

The coordinator evaluates the actions with its own planner; this side sends it the market prices. Guarantees: rents and changes
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from echo2.base.errors import ConfigError
from echo2.base.units import format_duration, parse_duration_s
from echo2.cli.link_text import link_text
from echo2.cli.operator import OperatorClient
from echo2.cli.status import OPERATOR_FOLDER
from echo2.coordinator.outlook import few_of
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.runtime.market import kept_file, newest
from echo2.cost_model.offers import MarketOffer
from echo2.outside import unix_now
from echo2.wire.bounds import OFFERS_MAX

AGE_MAX = "1h"
HISTORY_LINES = 8


def show(run: str, is_history: bool, own: argparse.Namespace) -> int:
    """Prints the advice or the history; returns the exit code."""
    if not (math.isfinite(own.learner_usd_per_hour) and own.learner_usd_per_hour >= 0):
        raise ConfigError(f"--learner-usd-per-hour: expected 0 or more, got {own.learner_usd_per_hour}")
    offers, prices = ([], "") if is_history else _market(own.offline)
    told = asyncio.run(_asked(_link_of(run), offers, prices, own.learner_usd_per_hour))
    if own.json:
        print(json.dumps(told["history"] if is_history else told, indent=2))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for line in history_lines(told.get("history", {})) if is_history else live_lines(told, own.learner_usd_per_hour):
        console.print(escape(line))
    return 0


def _link_of(run: str) -> str:
    """Returns the operator's link from a run's folder, or `run` itself as a link or @FILE."""
    link = Path(run) / "links" / "operator.link"
    return link_text(f"@{link}") if link.is_file() else link_text(run)


def _market(is_offline: bool) -> tuple[list[MarketOffer], str]:
    """Returns the cheapest offers of each kind and provider, at most OFFERS_MAX, and their source."""
    found = newest(
        kept_file(),
        built_in_catalogue(),
        must_fetch=False,
        may_fetch=not is_offline,
        age_max_s=parse_duration_s(AGE_MAX),
    )
    age_s = found.age_s(unix_now())
    aged = "" if age_s is None else f", fetched {format_duration(age_s)} ago"
    return few_of(found.offers, OFFERS_MAX), f"{found.source}{aged}"


async def _asked(link: str, offers: list[MarketOffer], prices: str, learner_usd_per_hour: float) -> dict[str, Any]:
    async with OperatorClient(link, OPERATOR_FOLDER.expanduser()) as operator:
        return await operator.outlook(offers, prices, learner_usd_per_hour)


# ---- what to do next


def live_lines(told: dict[str, Any], learner_usd_per_hour: float) -> list[str]:
    """Formats the advice for the operator."""
    if not told.get("is_known"):
        return [f"nothing to advise yet: the run waits for {told.get('waits_for', 'a first plan')}"]
    before = told["before"]
    learner = (
        f" and ${learner_usd_per_hour:g}/h of the learner"
        if learner_usd_per_hour
        else ", the learner's price not counted"
    )
    lines = [
        f"now      the learner trains {_percent(told['measured_utilisation'])} of the time; predicted "
        f"{_percents(before['utilisation'])}, publishing every {_steps(before['kappa'])}",
        f"limit    {told['limits']}",
        f"price    ${before['usd_per_hour']:.2f}/h of workers and machines{learner}; {_usd(before)} per million useful tokens; "
        f"{_ends(before)}",
        f"prices   {told['prices']}",
    ]
    if not told["actions"]:
        return [*lines, "do       nothing: no action that was weighed comes nearer to the target or costs less"]
    for number, action in enumerate(told["actions"], start=1):
        lines += _action_lines(number, action, before)
    return [*lines, "Ranges hold 9 times of 10. Each action was weighed by the run's own planner, alone."]


def _action_lines(number: int, action: dict[str, Any], before: dict[str, Any]) -> list[str]:
    after = action["after"]
    more = after["usd_per_hour"] - before["usd_per_hour"]
    change = "the same USD/h" if abs(more) < 0.005 else f"{'+' if more > 0 else '-'}${abs(more):.2f}/h"
    lines = [
        f"{number}. {action['text']}",
        f"   trains {_percent(before['utilisation']['expected'])} -> {_percents(after['utilisation'])}; {change}, "
        f"{_usd(before, False)} -> {_usd(after)} per million useful tokens; {_earlier(before, after)}",
    ]
    if action["what"] == "rent":
        count = action["machines_measured"]
        seen = "1 machine of this kind was measured" if count == 1 else f"{count} machines of this kind were measured"
        lines.append(f"   its rate: {seen if count else 'by the data sheet alone'}")
    if action["offer"]:
        lines.append(f"   the page rents offer {action['offer']!r} by a button")
    if action["workers"]:
        names = ", ".join(one["name"] for one in action["workers"][:8])
        lines.append(f"   {names}{', ...' if action['count'] > 8 else ''}")
    return lines


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def _percents(one: dict[str, float]) -> str:
    return f"{one['expected']:.0%} ({one['low']:.0%} to {one['high']:.0%})"


def _steps(kappa: int) -> str:
    return "step" if kappa == 1 else f"{kappa} steps"


def _usd(outlook: dict[str, Any], with_range: bool = True) -> str:
    one = outlook["usd_per_million_tokens"]
    if one is None or one["expected"] is None:
        return "unknown"
    ends = f" (${one['low']:.3f} to ${one['high']:.3f})" if with_range and None not in one.values() else ""
    return f"${one['expected']:.3f}{ends}"


def _ends(outlook: dict[str, Any]) -> str:
    one = outlook["hours_left"]
    if one is None or one["expected"] is None:
        return "its end is not known"
    ends = f" ({_hours(one['low'])} to {_hours(one['high'])})" if None not in one.values() else ""
    return f"ends in {_hours(one['expected'])}{ends}"


def _hours(value: float) -> str:
    return format_duration(3600 * value)


def _earlier(before: dict[str, Any], after: dict[str, Any]) -> str:
    old, new = before["hours_left"], after["hours_left"]
    if old is None or new is None or old["expected"] is None or new["expected"] is None:
        return "its end is not known"
    saved = old["expected"] - new["expected"]
    moved = (
        f"{_hours(abs(saved))} {'earlier' if saved > 0 else 'later'}, " if abs(saved) > 0.01 * old["expected"] else ""
    )
    return f"ends {moved}{_ends(after).removeprefix('ends ')}"


# ---- how predictions came out


def history_lines(told: dict[str, Any]) -> list[str]:
    """Formats one line per quantity, followed by its newest predictions."""
    lines = []
    for what, one in told.items():
        if not one["count"]:
            lines.append(f"{what}: nothing to compare yet; {one['open']} predictions are open")
            continue
        lines.append(
            f"{what}: {one['count']} predictions that were acted on; off by {one['error']:.1%} on average, what came was "
            f"{one['bias']:+.1%} from them; {one['held']} of {one['count']} within their interval (9 of 10 expected)"
        )
        for row in one["newest"][-HISTORY_LINES:]:
            value = row["measured"]
            mark = "within" if row["low"] <= value <= row["high"] else "outside"
            promised = f"{_plain(row['predicted'])} ({_plain(row['low'])} to {_plain(row['high'])})"
            lines.append(f"  predicted {promised}, came {_plain(value)}: {mark}; {row['about']}")
    return lines or ["nothing was predicted yet"]


def _plain(value: float) -> str:
    return f"{value:.4g}"
