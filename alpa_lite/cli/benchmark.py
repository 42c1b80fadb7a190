"""`alpa-lite bench` and `alpa-lite demo`: programs of the benchmarks, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from alpa_lite.cli.command import Command, enveloped
from alpa_lite.inspection.doctor import virtual_environment


def run_bench(given: argparse.Namespace) -> int:
    """`benchmarks.bench`, which makes the devices that it needs."""
    return _benchmark(BENCH, given, dict(os.environ))


def run_demo(given: argparse.Namespace) -> int:
    """`benchmarks.demo`, with virtual CPU devices that cannot hang."""
    return _benchmark(DEMO, given, virtual_environment(given.devices))


def _benchmark(command: Command, given: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run it; of what it prints as JSON, each line gets the envelope."""
    line = [sys.executable, "-m", f"benchmarks.{command.name}", *given.rest]
    if not given.json:
        done = subprocess.run(line, env=environment, check=False)
        if {"-h", "--help"} & set(given.rest):
            print(f"\n{command.example_text}")
        return done.returncode
    done = subprocess.run([*line, "--json"], env=environment, check=False, stdout=subprocess.PIPE, text=True)
    for text in (done.stdout or "").splitlines():
        print(json.dumps(enveloped(command.name, json.loads(text))) if text.startswith("{") else text)
    return done.returncode


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, default=8, help=argparse.SUPPRESS)


BENCH = Command(
    name="bench",
    about="planners against each other",
    example="--model train.py:example --cluster p3.16xlarge",
    run=run_bench,
    passes_on=True,
)

DEMO = Command(
    name="demo",
    about="plan, train and compare on this machine",
    example="--steps 20",
    run=run_demo,
    add_arguments=_demo_arguments,
    passes_on=True,
)
