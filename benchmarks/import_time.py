"""Measure what importing the package costs beside JAX: `python -m benchmarks.import_time`.

Prints the median seconds of seven processes for each line, run in alternation so that other load meets all of them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

_PROGRAMS = {
    "import jax": ("-c", "import jax"),
    "import alpa_lite": ("-c", "import alpa_lite"),
    "import alpa_lite, jax; alpa_lite.parallelize": ("-c", "import alpa_lite, jax; alpa_lite.parallelize"),
    "alpa-lite --version": ("-m", "alpa_lite.cli", "--version"),
    "alpa-lite completion bash": ("-m", "alpa_lite.cli", "completion", "bash"),
}
_ROUNDS = 7


def main() -> None:
    """Print the median of each program."""
    seconds: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for _ in range(_ROUNDS):
        for name, words in _PROGRAMS.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - begun)
    for name, values in seconds.items():
        print(f"{statistics.median(values):6.2f} s  {name}")


if __name__ == "__main__":
    main()
