"""The command `serve`: a serving plan for a file, beside those of other solvers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from alpa_lite import serving
from alpa_lite.cli.command import Command, answer, check_writable, suggests, writing
from alpa_lite.cli.exit_codes import Exit


def run_serve(given: argparse.Namespace) -> int:
    """Print the plan of a solver for a serving problem, and the costs of the other solvers."""
    check_writable(given.html)
    problem = serving.read_serving_problem(given.file)
    found = serving.compare_solvers(problem, given.threshold, solver=serving.SERVING_SOLVERS[given.solver])
    if given.html is not None:
        with writing(given.html):
            found.to_html(given.html)
    answer(given, found, found.to_json)
    return Exit.DONE


def _accuracy(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} was given; it must be a number")
    return found


def _arguments(parser: argparse.ArgumentParser) -> None:
    known = serving.known_serving_problems()
    file = parser.add_argument("file", metavar="FILE", help=f"a serving problem, or one of {', '.join(known)}")
    suggests(file, known)
    parser.add_argument(
        "--threshold", type=_accuracy, metavar="ACCURACY", help="the least accuracy (default: that of the file)"
    )
    solvers = tuple(serving.SERVING_SOLVERS)
    parser.add_argument("--solver", default="jellybean", choices=solvers, help="the solver of the plan")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page, with a drawing")


SERVE = Command(
    name="serve",
    about="choose the models and workers that serve a workflow",
    example="vqa-medium --threshold 56",
    run=run_serve,
    add_arguments=_arguments,
)
