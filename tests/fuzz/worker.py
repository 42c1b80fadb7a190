"""A process that runs programs: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict

from tests.fuzz.grammar import Program, outcome


def main() -> None:
    """Answer each line on standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        answers.write(json.dumps(asdict(outcome(Program.from_json(line)))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
