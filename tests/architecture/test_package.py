"""The wheel and the source distribution: what is in them, and that they work where the repository is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest

from alpa_lite.api.doctor import virtual_cpu_environment

ROOT = Path(__file__).parents[2]
PACKAGES = ("alpa_lite", "cost_models")
TOP = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CONTRIBUTING.md")
OTHER = ("Makefile", "constraints.txt", "mkdocs.yml")


def _run(*command: str, cwd: Path, timeout: float, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def _files(*folders: str) -> set[str]:
    """Files of the repository below some folders, but for what Python leaves behind."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in (*TOP, *OTHER):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "benchmarks", "docs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source))
    _run(*command, cwd=folder, timeout=300)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == _files(*PACKAGES)
    assert {"alpa_lite/py.typed", "cost_models/py.typed", "alpa_lite/inspection/page/page.js"} <= names
    assert sum(name.startswith("cost_models/clusters/") for name in names) > 30


def test_the_source_has_documentation_and_tests_too(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _files("docs", "tests") | {*TOP, *OTHER} <= names


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        found = message_from_string(archive.read(name).decode())
        (commands,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "alpa-lite = alpa_lite.cli:main" in archive.read(commands).decode()
    assert found["Requires-Python"] == ">=3.11"
    needed = {re.split(r"[<>=!; \[]", line)[0] for line in found.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed >= {"jax", "numpy", "rich"}
    assert not needed & {"flax", "optax", "matplotlib", "pytest", "playwright"}


ALONE = """
import alpa_lite as al, alpa_lite.cli.bench.__main__, alpa_lite.cli.demo, cost_models, jax, jax.numpy as jnp, sys
folder = sys.argv[1]
assert all(package.__file__.startswith(folder) for package in (al, cost_models))
step = lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
plan = al.plan(step, jnp.ones((64, 64)), jnp.ones((16, 64)), cluster="p3.16xlarge", planner=al.planners.Megatron())
plan.to_html("plan.html")
assert open("plan.html").read().rstrip().endswith("</html>")
print(plan)
"""


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder), "ALPA_LITE_CACHE": "off"}
    out = _run(sys.executable, "-c", ALONE, str(folder), cwd=tmp_path, env=environment, timeout=120)
    assert "Megatron tensor parallel" in out


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of a fresh environment that the wheel, and what it needs, was installed into."""
    folder = tmp_path_factory.mktemp("empty")
    _run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder, timeout=120)
    programs = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (str(programs / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    _run(*pip, str(wheel), cwd=folder, timeout=900)
    yield programs
    shutil.rmtree(folder)


@pytest.mark.long
def test_doctor_quickstart_demo_and_bench_pass_in_an_empty_environment(empty_environment: Path, tmp_path: Path) -> None:
    """Needs a package index that pip reaches."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "XDG_CACHE_HOME": str(tmp_path)}
    python, alpa_lite = str(empty_environment / "python"), str(empty_environment / "alpa-lite")
    assert "as jax.jit does" in _run(alpa_lite, "doctor", cwd=tmp_path, env=environment, timeout=180)
    demo = ("demo", "--steps", "3", "--rounds", "2", "--layers", "2", "--hidden", "64")
    assert "agree" in _run(alpa_lite, *demo, cwd=tmp_path, env=environment, timeout=300)
    bench = ("bench", "--model", "mlp-tiny", "--planners", "auto,fsdp", "--steps", "2", "--calibrate", "0")
    assert "mlp-tiny: auto" in _run(alpa_lite, *bench, cwd=tmp_path, env=environment, timeout=300)
    # The pages train with optax, which the project itself runs without.
    _run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        str(ROOT / "constraints.txt"),
        "optax",
        cwd=tmp_path,
        timeout=300,
    )
    virtual = {**environment, **virtual_cpu_environment(8)}
    for page in ("index", "quickstart"):
        command = (python, "-I", str(ROOT / "tests" / "docs" / "run_pages.py"), str(ROOT / "docs" / f"{page}.md"))
        assert set(json.loads(_run(*command, cwd=tmp_path, env=virtual, timeout=300)).values()) == {""}
    example = (python, "-I", str(ROOT / "docs" / "examples" / "train_mlp.py"))
    assert "step 19  loss" in _run(*example, cwd=tmp_path, env=virtual, timeout=180)
