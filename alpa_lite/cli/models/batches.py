"""Batches to train on: random ones for any model, and windows of a text that every machine has.

- `draw_batch`: a random batch of the shapes and limits of a model;
- `load_text`: the source files of Python's standard library, byte by byte, so that the vocabulary is the 256 byte
  values; `text_batches` draws windows of it.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from alpa_lite.cli.models.model_parts import Model


def draw_batch(model: Model, batch_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw a batch: integers below their limits, loss weights in [0.5, 1.5), other numbers normal."""
    rng, limits = np.random.default_rng(seed), model.limits

    # Names decide, not dtypes: a loss divides by the sum of its weights, which must not come near zero.
    def draw(name: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if name in limits:
            return rng.integers(0, limits[name], shape.shape).astype(shape.dtype)
        if name.endswith("weights"):
            return rng.uniform(0.5, 1.5, shape.shape).astype(shape.dtype)
        return rng.normal(size=shape.shape).astype(shape.dtype)

    return {name: draw(name, shape) for name, shape in model.batch_shapes(batch_size).items()}


VOCAB_SIZE = 256
DEFAULT_MAX_BYTES = 4 << 20
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def source_files(root: Path) -> Iterator[Path]:
    """Yield the ``.py`` files under `root` in sorted order, without installed packages and tests."""
    for folder, subfolders, files in os.walk(root):
        # `os.walk` descends into what is left in its own list. Sorted, so that one Python version gives one text.
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder) / name


def load_text(max_bytes: int = DEFAULT_MAX_BYTES, root: Path | None = None) -> np.ndarray:
    """Return the first `max_bytes` bytes, uint8, of the source files in a folder (None: Python's standard library).

    Files that cannot be read are skipped.
    """
    chunks: list[bytes] = []
    missing = max_bytes
    for path in source_files(Path(sysconfig.get_paths()["stdlib"]) if root is None else root):
        if missing <= 0:
            break
        try:
            # Cut as it is read, so that the text has exactly the given length.
            chunks.append(path.read_bytes()[:missing])
        except OSError:
            continue
        missing -= len(chunks[-1])
    return np.frombuffer(b"".join(chunks), dtype=np.uint8)


def text_batches(
    num_steps: int, batch_size: int, seq_len: int, seed: int = 0, *, text: np.ndarray | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yield random windows of a text as ``{"tokens", "targets"}``, both ``[batch_size, seq_len]`` int32.

    The targets are the tokens shifted by one; `text` are bytes to draw from, by default those of `load_text`. Raises
    ValueError if the text is shorter than one window.
    """
    data = load_text() if text is None else text
    if len(data) <= seq_len:
        raise ValueError(f"The text has {len(data)} bytes; windows of seq_len={seq_len} need {seq_len + 1} or more.")
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        # One byte more than a window, whose last target it is.
        starts = rng.integers(0, len(data) - seq_len, size=batch_size)
        windows = data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
