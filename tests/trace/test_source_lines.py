"""The user's line: code of installed packages is passed over, wherever they were installed to."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from alpa_lite.trace.from_jaxpr import from_jaxpr
from alpa_lite.trace.source_lines import in_a_library, is_in_a_library


@pytest.mark.parametrize(("installed", "file"), [(True, "test_source_lines.py"), (False, "of_a_test.py")])
def test_packages_installed_to_a_folder_are_a_library_and_editable_ones_are_not(
    installed: bool, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{'installed' if installed else 'editable'}_of_a_test"
    package = tmp_path / name / "layers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "of_a_test.py").write_text("def double(x):\n    return x + x\n")
    if installed:
        (tmp_path / "of_a_test-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    double: Any = importlib.import_module(f"{name}.layers.of_a_test").double
    closed = jax.make_jaxpr(lambda x: double(x))(np.ones(3))
    (op,) = from_jaxpr(closed, ["x"]).graph.ops
    assert Path(op.source.partition(":")[0]).name == file
    for loaded in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, loaded)


def test_packages_beside_the_search_path_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "a-1.0.dist-info").mkdir()
    line = f"{tmp_path / 'libraries' / 'a' / 'b.py'}:3:5 (f)"
    assert not in_a_library(line)
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    assert in_a_library(line)
    # Neither a folder with a longer name, nor what lies above.
    assert not in_a_library(f"{tmp_path / 'libraries2' / 'b.py'}:3:5 (f)")
    assert not in_a_library(f"{tmp_path / 'b.py'}:3:5 (f)")


def test_files_of_python_and_of_installed_packages_are_a_library() -> None:
    assert is_in_a_library(jax.__file__) and is_in_a_library(importlib.__file__)
    assert not is_in_a_library(__file__)
