"""The record of a checkpoint, in a file that exists from its first moment on: the mark of our folders.

    step     its number, which reveals a folder that was renamed
    parent   the step that its run had saved or restored before
    save     how many saves there were in the folder: it tells which of two branches is newer

The file contains its own digest, as it is read long before all other checksums are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alpa_lite.runtime.checkpoint.untrusted import read_bounded
from cost_models.untrusted_text import parse_json

RECORD = "alpa_lite_checkpoint.json"
"""Name of the file."""

_OWN = re.compile(
    rf"SHA256SUMS(\..+)?|{re.escape(RECORD)}|leaves\.json|plan\.json|_METADATA|_CHECKPOINT_METADATA|commit_success\.txt"
    r"|(ocdbt\.process_[0-9]+/)?(d/[0-9a-f]{32}|manifest\.ocdbt)(\.__lock)?"
)
_MOST_BYTES = 4096
_LARGEST = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of a record; see the module. `parent` is None if nothing was saved or restored before."""

    step: int
    parent: int | None
    save: int

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        data = asdict(self)
        return json.dumps({**data, "sha256": _digest(data)}).encode()


def read_record(folder: Path) -> Record | None:
    """Return the record of a checkpoint; None if it is missing, damaged, or of a later version."""
    try:
        data = parse_json(read_bounded(folder / RECORD, _MOST_BYTES), any_text=True, max_values=16, max_depth=1)
        digest = data.pop("sha256")
        record = Record(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    numbers = (record.step, record.save, 0 if record.parent is None else record.parent)
    is_valid = all(type(number) is int and 0 <= number < _LARGEST for number in numbers)
    return record if is_valid and digest == _digest(asdict(record)) else None


def is_own(name: str) -> bool:
    """Return True if a file of a checkpoint, by its path in the folder, is one that alpa_lite or Orbax writes."""
    return _OWN.fullmatch(name) is not None


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files in a folder and its subfolders; links are not followed."""
    found = list[str]()
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        found += [Path(place, name).relative_to(folder).as_posix() for name in (*names, *links)]
    return found


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
