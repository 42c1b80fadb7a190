"""A text dataset available on every machine: the source files of Python's standard library, byte by byte.

The vocabulary is the 256 byte values. Files are read in sorted order, so one Python version always gives the same text.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256
DEFAULT_MAX_BYTES = 4 << 20
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def source_files(root: Path) -> Iterator[Path]:
    """Yield the ``.py`` files under `root` in sorted order, without installed packages and tests."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder) / name


def load(max_bytes: int = DEFAULT_MAX_BYTES, root: Path | None = None) -> np.ndarray:
    """Concatenate source files until `max_bytes` are reached; files that cannot be read are skipped.

    Args:
        max_bytes: length at which the text is cut.
        root: folder to read; None means Python's standard library.

    Returns:
        ``[num_bytes]`` uint8, ``num_bytes <= max_bytes``.
    """
    chunks: list[bytes] = []
    missing = max_bytes
    for path in source_files(Path(sysconfig.get_paths()["stdlib"]) if root is None else root):
        if missing <= 0:
            break
        try:
            chunks.append(path.read_bytes()[:missing])
        except OSError:
            continue
        missing -= len(chunks[-1])
    return np.frombuffer(b"".join(chunks), dtype=np.uint8)


def batches(
    num_steps: int, batch_size: int, seq_len: int, seed: int = 0, *, text: np.ndarray | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Draw random windows of the text; the targets are the tokens shifted by one.

    Args:
        num_steps: number of batches to yield.
        batch_size: windows per batch.
        seq_len: tokens per window.
        seed: seed of the random windows; the same seed gives the same batches.
        text: ``[num_bytes]`` bytes to draw from; None means `load`.

    Yields:
        ``{"tokens", "targets"}``, both ``[batch_size, seq_len]`` int32.

    Raises:
        ValueError: the text is shorter than one window.
    """
    data = load() if text is None else text
    if len(data) <= seq_len:
        raise ValueError(f"The text has {len(data)} bytes; windows of seq_len={seq_len} need {seq_len + 1} or more.")
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        starts = rng.integers(0, len(data) - seq_len, size=batch_size)
        windows = data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
