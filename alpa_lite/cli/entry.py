"""The parser of all commands, and how a run of one of them ends."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import alpa_lite as al
from alpa_lite.cli.benchmark import BENCH, DEMO
from alpa_lite.cli.command import Command, Exit, complain
from alpa_lite.cli.completion import COMPLETION
from alpa_lite.cli.launching import LAUNCH
from alpa_lite.cli.machine import CALIBRATE, DOCTOR
from alpa_lite.cli.planning import PLAN
from alpa_lite.cli.reading import DIFF, EXPLAIN, SIMULATE
from alpa_lite.cli.solving import SOLVE
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.intra_op.solve_file import seconds_since_start
from cost_models import CostModelError

COMMANDS: tuple[Command, ...] = (
    PLAN, EXPLAIN, DIFF, SIMULATE, SOLVE, CALIBRATE, DOCTOR, LAUNCH, BENCH, DEMO, COMPLETION,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="alpa-lite",
        description="Spread a JAX train step over devices, and see why.",
        epilog="example:\n  alpa-lite plan train.py:example --cluster p3.16xlarge --output plan.json\n\n"
        "exit codes: 0 done, 1 error, 2 wrong usage, 3 nothing fits, 130 interrupted, 141 the reader left",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"alpa_lite {al.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code; errors of alpa_lite and of files are printed as their sentence."""
    begun = time.perf_counter() - (seconds_since_start() if argv is None else 0.0)  # imports take time too
    parser = build_parser()
    given, rest = parser.parse_known_args(argv)
    given.rest, given.begun, given.parser = rest, begun, parser
    if rest and not given.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        return run(given)
    except InfeasibleError as error:
        complain(error)
        return Exit.INFEASIBLE
    except (AlpaLiteError, CostModelError) as error:
        complain(error)
        return Exit.ERROR
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; without this Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.PIPE_CLOSED
    except KeyboardInterrupt:
        complain(f"Interrupted: {given.command} has no result yet.")
        return Exit.INTERRUPTED
