"""Run random programs: ``python -m tests.fuzz --programs 1000 --seed 0 --workers 2 --seconds 3600 --json found.json``.

Prints how many programs are equal to `jax.jit` and refused, by their labels (what is refused and labelled additive is
refused wrongly); and each failure once: its seed, the shrunk program as Python, and the sentence.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.grammar import Program, draw, failure, label, source
from tests.fuzz.oracle import Outcome
from tests.fuzz.pool import Worker
from tests.fuzz.shrink import shrink


@dataclass(kw_only=True)
class Found:
    """What has been found."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


def signature(what: str, found: Outcome) -> str:
    """What failures have in common: the way in which they fail, and the sentence without its places and shapes."""
    if what == "wrong":
        return what
    sentence = re.sub(r"<program \S+:\d+(:\d+)? \(.*?\)|\[[\d, ]*\]|\d+", "", found.detail)
    return f"{what}: {sentence[:120]}"


def search(seed: int, worker: Worker, found: Found, *, refusals: bool) -> None:
    """Run the program of a seed, and shrink it if it fails."""
    program = draw(seed)
    result = worker.outcome(program)
    what = failure(program, result)
    with found.lock:
        found.counts["programs"] += 1
        found.counts[result.kind] += 1
        found.counts[f"{result.kind}, labelled {label(program)}"] += 1
        if result.kind in ("unplanned", "unusable", "unstable"):
            found.notes.append({"seed": seed, "kind": result.kind, "detail": result.detail})
        sentence = signature(what, result)
        known = sentence in found.seen
        told = refusals or what != "refused although additive"
        if not what or not told or (known and what != "wrong"):
            return
        found.seen.add(sentence)

    last = [result]

    def fails(candidate: Program) -> bool:
        now = worker.outcome(candidate)
        same = failure(candidate, now) == what and (what == "wrong" or signature(what, now) == sentence)
        if same:
            last[0] = now
        return same

    small = shrink(program, fails)
    pieces = f"{what}: {[name for _, name, _ in small.pieces()]}"
    with found.lock:
        if pieces in found.seen:
            return
        found.seen.add(pieces)
        found.failures.append(
            {"seed": seed, "what": what, "sentence": last[0].detail, "program": asdict(small), "source": source(small)}
        )
        print(f"\n=== {what}: seed {seed}\n{small.to_json()}\n{last[0].detail[:600]}\n{source(small)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run programs until there are enough, or the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no program starts after that")
    parser.add_argument("--no-refusals", action="store_true", help="refusals are counted, but not told")
    parser.add_argument("--json", type=Path, help="where counts and failures are written")
    chosen = parser.parse_args(arguments)
    found, end = Found(), time.monotonic() + chosen.seconds
    seeds = iter(range(chosen.seed, chosen.seed + chosen.programs))

    def work() -> None:
        worker = Worker()
        try:
            while time.monotonic() < end:
                with found.lock:
                    seed = next(seeds, None)
                if seed is None:
                    return
                search(seed, worker, found, refusals=not chosen.no_refusals)
        finally:
            worker.close()

    with ThreadPoolExecutor(chosen.workers) as threads:
        for done in [threads.submit(work) for _ in range(chosen.workers)]:
            done.result()
    print("\n" + "\n".join(f"{count:6} {name}" for name, count in sorted(found.counts.items()) if name))
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"counts": found.counts, "failures": found.failures, "notes": found.notes}, indent=1)
        )
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
