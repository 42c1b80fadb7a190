"""Compiled functions and their cache on disk."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path

import pytest

MODULE = """
from typing import NamedTuple

from alpa_lite.program.kernel import kernel


class {name}(NamedTuple):
    first: int
    second: int


@kernel
def total(pair: {name}) -> int:
    return pair.first + pair.second


PAIR = {name}(1, 2)
"""


def test_a_class_in_a_signature_may_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "module_of_kernels.py"
    for name in ("Pair", "Couple"):
        path.write_text(MODULE.format(name=name))
        os.utime(path, (1e9 + len(name), 1e9))
        sys.modules.pop(path.stem, None)
        importlib.invalidate_caches()
        module = importlib.import_module(path.stem)
        assert module.total(module.PAIR) == 3
        assert sum(module.total.stats.cache_misses.values()) == 1
    sys.modules.pop(path.stem, None)


def test_compiled_functions_are_loaded_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "module_of_a_kernel.py"
    path.write_text(MODULE.format(name="Pair"))
    for misses in (1, 0):
        sys.modules.pop(path.stem, None)
        module = importlib.import_module(path.stem)
        assert module.total(module.PAIR) == 3
        # The class is another one after the second import, but has the same name.
        assert sum(module.total.stats.cache_misses.values()) <= misses
    sys.modules.pop(path.stem, None)


def test_functions_whose_file_has_no_folder_for_a_cache_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "module_that_left.py"
    path.write_text(MODULE.format(name="Pair"))
    module = importlib.import_module(path.stem)
    path.unlink()  # to numba this is a module in a zip file
    assert module.total(module.PAIR) == 3
    sys.modules.pop(path.stem, None)


def test_functions_are_compiled_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import FunctionCache

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FunctionCache, "save_overload", full)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "module_on_a_full_disk.py"
    path.write_text(MODULE.format(name="Pair"))
    module = importlib.import_module(path.stem)
    assert module.total(module.PAIR) == 3
    sys.modules.pop(path.stem, None)
