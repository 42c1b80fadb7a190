"""Write the program after each pass to a file, and an index of the passes with their seconds and numbers of ops."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from alpa_lite.program.passes import PassRun
from alpa_lite.program.show import show
from alpa_lite.step.rematerialisation import LayeredStep
from alpa_lite.step.split import TracedStep

INDEX = "index.txt"


@dataclass(frozen=True)
class PassFiles:
    """The files of a folder, which is made if it does not exist.

    Attributes:
        folder: the folder.
    """

    folder: Path
    _rows: list[str] = field(default_factory=list[str])

    def write(self, run: PassRun) -> None:
        """Write the program that a pass returned."""
        program = run.program
        step = program.step if isinstance(program, (TracedStep, LayeredStep)) else None
        name = f"{len(self._rows):02}-{re.sub('[^a-z0-9]+', '-', run.name)}.txt"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(show(program.graph, step=step) + "\n")
        num_ops = sum(1 for _ in program.graph.walk())
        self._rows.append(f"{name:40} {run.seconds:10.4f} {len(program.graph.ops):8} {num_ops:14}")

    def write_index(self, title: str) -> Path:
        """Write the index and return its path."""
        head = f"{'file':40} {'seconds':>10} {'ops':>8} {'with bodies':>14}"
        path = self.folder / INDEX
        path.write_text("\n".join((title, "", head, *self._rows, "")))
        return path
