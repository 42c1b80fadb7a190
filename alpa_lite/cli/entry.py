"""The parser of all commands, and the function that runs one of them."""

from __future__ import annotations

import argparse
import sys
import time

import alpa_lite as al
from alpa_lite.cli.benchmark_commands import BENCH, DEMO
from alpa_lite.cli.check_command import CHECK
from alpa_lite.cli.command import Command, ended
from alpa_lite.cli.completion import COMPLETION
from alpa_lite.cli.launch_command import LAUNCH
from alpa_lite.cli.machine_commands import CALIBRATE, DOCTOR
from alpa_lite.cli.plan_command import PLAN
from alpa_lite.cli.plan_file_commands import DIFF, EXPLAIN, SIMULATE
from alpa_lite.cli.solve_command import SOLVE
from alpa_lite.intra_op.problem_file import seconds_since_start

COMMANDS: tuple[Command, ...] = (
    PLAN, CHECK, EXPLAIN, DIFF, SIMULATE, SOLVE, CALIBRATE, DOCTOR, LAUNCH, BENCH, DEMO, COMPLETION,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
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
    """Run one command and return its exit code; expected errors are printed as their message."""
    begun = time.perf_counter() - (seconds_since_start() if argv is None else 0.0)  # imports take time too
    words, parser = sys.argv[1:] if argv is None else argv, build_parser()
    given = parser.parse_args(words)
    given.words, given.begun, given.all_commands = words[1:], begun, parser
    return ended(given.command, lambda: given.run(given))
