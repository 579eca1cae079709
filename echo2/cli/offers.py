"""`echo2 offers`: ranks the machines on offer by what a million useful tokens of this run would cost on each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.units import format_duration
from echo2.cli.options import config_of
from echo2.cli.plan import load_catalogue, question_of
from echo2.cli.sizing import lengths_of
from echo2.coordinator.money.market import keep, kept_file, newest, recorded
from echo2.cost_model.market import SORTS, OfferFilter, Ranked, ranked
from echo2.outside import unix_now


def run_offers(own: argparse.Namespace, rest: Sequence[str]) -> int:
    """`echo2 offers`; returns the exit code."""
    logging.basicConfig(format="echo2: %(message)s", level=logging.WARNING)
    config = config_of(own.files, own.preset, rest)
    gpus = load_catalogue(own.catalogue)
    question, origin = question_of(config, {}, gpus, own.billions)
    size = question.model
    if own.recorded is not None:
        found = recorded(own.recorded)
    else:
        found = newest(kept_file(), gpus, must_fetch=own.refresh, may_fetch=not own.offline, age_max_s=own.max_age)
    if own.record is not None:
        keep(found, own.record)
    spot = True if own.spot else False if own.on_demand else None
    wish = OfferFilter(
        tuple(one.lower() for one in own.provider), tuple(one.lower() for one in own.gpu), own.region, spot,
        own.usd_per_hour_max,
    )  # fmt: skip
    rows = ranked(found.offers, size, lengths_of(config), gpus, question.tokens_in_cache, wish)
    if not rows:
        raise ConfigError(f"offers: expected one that passes the filters, none of {len(found.offers)} does")
    rows.sort(key=lambda one: (bool(one.refusal), SORTS[own.sort](one)))
    if own.json:
        print(json.dumps([_plain(one) for one in rows[: own.rows or None]], indent=2))
        return 0
    best: dict[str, Ranked] = {}
    for one in rows:
        best.setdefault(one.kind or one.offer.gpu, one)
    shown = list(best.values()) if own.rows is None else rows[: own.rows or None]
    from rich.console import Console

    console, age_s = Console(highlight=False), found.age_s(unix_now())
    aged = "" if age_s is None else f", fetched {format_duration(age_s)} ago"
    console.print(
        f"{size.billions:.3g} billion parameters ({origin}), sequences of up to {lengths_of(config).of(size)} tokens\n"
        f"{len(rows)} offers from {found.source}{aged}\n"
        "Rates are predicted from data sheets; 9 of 10 machines are expected within the interval.",
    )
    console.print(_table([one for one in shown if not one.refusal]))
    refused = {f"{one.kind or one.offer.gpu} ({one.refusal})": None for one in rows if one.refusal}
    if refused:
        console.print(f"not for this model: {'; '.join(refused)}")
    if own.rows is None:
        console.print("One row a kind of GPU, its best; --rows 0 shows every offer.")
    return 0


def _table(shown: Sequence[Ranked]) -> Any:
    """Fits 80 columns, as long as no region has more than 16 letters."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("machine", "of", "USD/h", "tokens/s", "USD per million tokens"):
        table.add_column(column, justify="right" if "/" in column else "left", overflow="fold")
    for one in shown:
        offer = one.offer
        usd = f"{one.usd_per_million:.3f} ({one.usd_low:.3f} to {one.usd_high:.3f})"
        egress = f", and {one.egress_usd_per_gib:.3f} a GiB sent" if one.egress_usd_per_gib else ""
        table.add_row(
            f"{offer.gpu_count} x {one.kind or offer.gpu}", f"{offer.provider} {offer.region}".strip(),
            f"{offer.usd_per_hour:.3f}{' spot' if offer.is_spot else ''}", f"{one.tokens_per_s:.0f}", usd + egress,
        )  # fmt: skip
    return table


def _plain(one: Ranked) -> dict[str, object]:
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(one).items()}
