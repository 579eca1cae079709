"""`echo2 offers`: ranks the machines on offer by what a million useful tokens of this run would cost on each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.units import format_duration, parse_duration_s
from echo2.cli.options import make_importable
from echo2.cli.plan import load_catalogue, question_of
from echo2.cli.run_shape import lengths_of, model_of
from echo2.config.load import load_config, parse_overrides
from echo2.coordinator.runtime import experience_file
from echo2.coordinator.runtime.market import Catalogue, keep, kept_file, newest, recorded
from echo2.cost_model.catalogue import GpuType
from echo2.cost_model.experience import Experience
from echo2.cost_model.offers import SORTS, OfferFilter, Ranked, Ranker
from echo2.outside import unix_now

COLUMNS = (
    "provider",
    "region",
    "machine",
    "spot",
    "USD/h",
    "sequences",
    "tokens/s",
    "measured",
    "USD per million tokens",
    "egress/GiB",
)
ROWS = 20
AGE_MAX = "1h"


def add_offers_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `echo2 offers`."""
    text = "what can be rented, by what a million useful tokens of this run would cost on it"
    parser = subparsers.add_parser("offers", help=text, description=text)
    parser.set_defaults(command=_run, takes_overrides=True)
    parser.add_argument("files", nargs="*", type=Path, metavar="RUN.toml", help="the run's config; defaults without")
    parser.add_argument("--preset", help="local, lan or wan")
    parser.add_argument("--provider", action="append", default=[], help="only of this one; may be repeated")
    parser.add_argument("--gpu", action="append", default=[], help="only this kind, such as RTX4090; may be repeated")
    parser.add_argument("--region", default="", help="only regions whose name holds this")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--spot", action="store_true", help="only spot machines")
    kinds.add_argument("--on-demand", action="store_true", help="no spot machines")
    parser.add_argument("--usd-per-hour-max", type=float, default=math.inf, metavar="USD", help="no dearer machines")
    parser.add_argument(
        "--sort", choices=sorted(SORTS), default="tokens", help="by USD per token, by price or by speed"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help=f"so many lines, 0: all (default: {ROWS})")
    parser.add_argument("--catalogue", type=Path, metavar="GPUS.toml", help="data sheets instead of the built-in ones")
    fetching = parser.add_mutually_exclusive_group()
    fetching.add_argument("--refresh", action="store_true", help="fetch prices now, or fail")
    fetching.add_argument("--offline", action="store_true", help="open no connection")
    parser.add_argument(
        "--max-age", default=AGE_MAX, metavar="AGE", help=f"fetch where kept prices are older (default: {AGE_MAX})"
    )
    fetching.add_argument("--recorded", type=Path, metavar="FILE", help="a recorded catalogue instead of the market")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what was found in a file, for --recorded")
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def _run(own: argparse.Namespace, rest: Sequence[str]) -> int:
    logging.basicConfig(format="echo2: %(message)s", level=logging.WARNING)
    make_importable(own.files)
    config = load_config(own.files, own.preset, parse_overrides(rest))
    gpus = load_catalogue(own.catalogue)
    size, origin = model_of(config.model.path)
    found = _found(own, gpus)
    if own.record is not None:
        keep(found, own.record)
    spot = True if own.spot else False if own.on_demand else None
    wish = OfferFilter(
        tuple(one.lower() for one in own.provider), tuple(one.lower() for one in own.gpu), own.region, spot,
        own.usd_per_hour_max,
    )  # fmt: skip
    in_cache = question_of(config, {}, gpus)[0].tokens_in_cache
    known = experience_file.known(experience_file.place(config.coordinator.machines_file))
    ranked = Ranker(size, lengths_of(config), gpus, known, in_cache).ranked(found.offers, wish)
    if not ranked:
        raise ConfigError(f"offers: expected one that passes the filters, none of {len(found.offers)} does")
    ranked.sort(key=lambda one: (bool(one.refusal), SORTS[own.sort](one)))
    shown = ranked[: own.rows or None]
    if own.json:
        print(json.dumps([_plain(one) for one in shown], indent=2))
        return 0
    print(f"{size.billions:.3g} billion parameters ({origin}), sequences of up to {lengths_of(config).of(size)} tokens")
    print(_source_line(found, len(ranked)))
    print(_experience_line(known, {one.kind for one in ranked}))
    from rich.console import Console

    Console(highlight=False).print(_table(shown))
    return 0


def _found(own: argparse.Namespace, gpus: Mapping[str, GpuType]) -> Catalogue:
    if own.recorded is not None:
        return recorded(own.recorded)
    age_max_s = parse_duration_s(own.max_age)
    return newest(kept_file(), gpus, must_fetch=own.refresh, may_fetch=not own.offline, age_max_s=age_max_s)


def _source_line(found: Catalogue, count: int) -> str:
    age_s = found.age_s(unix_now())
    aged = "" if age_s is None else f", fetched {format_duration(age_s)} ago"
    return f"{count} offers from {found.source}{aged}; 9 of 10 machines are expected within the interval"


def _experience_line(known: Experience, kinds: set[str]) -> str:
    """Describes where the predicted rates come from."""
    measured = {kind: known.belief(kind).machines for kind in sorted(kinds & set(known.ratios)) if known.ratios[kind]}
    newest = known.newest_unix_s()
    if not measured or newest is None:
        return "rates are predicted from data sheets: no earlier run on this machine measured one of these kinds"
    counts = ", ".join(f"{kind} ({count})" for kind, count in measured.items())
    aged = format_duration(max(0.0, unix_now() - newest))
    return f"rates corrected by machines of earlier runs, newest {aged} ago: {counts}; others by data sheets alone"


def _table(shown: Sequence[Ranked]) -> Any:
    from rich.table import Table

    table = Table()
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for one in shown:
        offer = one.offer
        machine = f"{offer.gpu_count} x {one.kind or offer.gpu}"
        where = (offer.provider, offer.region, machine, "spot" if offer.is_spot else "", f"{offer.usd_per_hour:.3f}")
        if one.refusal:
            table.add_row(*where, "0", "", "", f"not this model: {one.refusal}", "")
            continue
        usd = f"{one.usd_per_million:.3f} ({one.usd_low:.3f} to {one.usd_high:.3f})"
        egress = f"{one.egress_usd_per_gib:.3f}" if one.egress_usd_per_gib else ""
        table.add_row(
            *where, str(one.sequences), f"{one.tokens_per_s:.0f}", str(one.machines_measured or ""), usd, egress
        )
    return table


def _plain(one: Ranked) -> dict[str, object]:
    told = dataclasses.asdict(one)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in told.items()
    }
