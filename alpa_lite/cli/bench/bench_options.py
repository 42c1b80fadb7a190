"""The options of `alpa-lite bench`, for its parser and for shell completion."""

from __future__ import annotations

import argparse
from pathlib import Path

from alpa_lite.cli.bench.targets import ALPA, ZOO
from alpa_lite.cli.command import count, positive, suggests
from alpa_lite.planners.by_name import PLANNERS
from cost_models.cluster import known_clusters


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options except `--json`, which every command has."""
    model = parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"{', '.join(ZOO)}; a model of Alpa's evaluation such as gpt-2.6B, or alpa for all; or MODULE:FUNCTION or "
        "FILE.py:FUNCTION. Several are allowed (default: GPT, mixture of experts and Wide-ResNet of laptop size)",
    )
    suggests(model, (*ZOO, *ALPA, "alpa"))
    cluster = parser.add_argument(
        "--cluster", metavar="NAME[:HOSTS]", help="local (default), a known cluster, or a .json file"
    )
    suggests(cluster, ("local", *known_clusters()))
    planners = parser.add_argument(
        "--planners",
        default="all",
        metavar="LIST",
        help=f"all (default), or some of {', '.join(PLANNERS)} with options, as auto,pipeline:pipeline=4",
    )
    suggests(planners, ("all", *PLANNERS))
    parser.add_argument("--batch", type=positive, metavar="N", help="samples per step (default: as the model says)")
    counts = parser.add_argument(
        "--num-microbatches", default="auto", metavar="LIST", help='numbers, or "auto" (default: auto)'
    )
    suggests(counts, ("auto",))
    parser.add_argument(
        "--steps", type=count, default=9, metavar="N", help="steps of each plan to measure (default: 9)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--measure", action="store_true", help="run the plans in turn (default on this machine)")
    how.add_argument("--simulate", action="store_true", help="price the plans only")
    parser.add_argument(
        "--devices", type=count, default=8, metavar="N", help="virtual CPU devices; 0: those at hand (default: 8)"
    )
    parser.add_argument(
        "--calibrate",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to measure the devices; 0: as known (default: 30)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep rows.jsonl, report.html and a chart per model")
    parser.add_argument(
        "--fail-above", type=float, metavar="R", help="exit with 1 where auto / best manual plan is above this"
    )
