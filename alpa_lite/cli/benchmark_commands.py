"""`alpa-lite bench` and `alpa-lite demo`: programs in processes of their own, which make the devices."""

from __future__ import annotations

import argparse
import json
import os

from alpa_lite.cli.command import Command, enveloped, run_module


def run_benchmark(given: argparse.Namespace) -> int:
    """Run `alpa_lite.cli.bench` or `alpa_lite.cli.demo` in a new process.

    With `--json`, each line of JSON that the program prints is put into the envelope of the command.
    """

    def wrap(line: str) -> None:
        print(json.dumps(enveloped(given.command, json.loads(line))) if line.startswith("{") else line, flush=True)

    return run_module(f"alpa_lite.cli.{given.command}", given.words, os.environ, read=wrap if given.json else None)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from alpa_lite.cli.bench.bench_options import add_options

    add_options(parser)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    from alpa_lite.cli.demo import add_options

    add_options(parser)


BENCH = Command(
    name="bench",
    about="planners against each other",
    example="--model train.py:example --cluster p3.16xlarge",
    run=run_benchmark,
    add_arguments=_bench_arguments,
)

DEMO = Command(
    name="demo",
    about="plan, train and compare on this machine",
    example="--steps 20",
    run=run_benchmark,
    add_arguments=_demo_arguments,
)
