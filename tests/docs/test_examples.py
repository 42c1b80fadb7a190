"""The examples of the documentation run, each within half a minute on an idle machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))

SHOWN = {
    "train_mlp": "step 19  loss",
    "plan_without_devices": "loaded, and found to belong to the step",
    "flax_linen": "as with jax.jit",
    "flax_nnx": "outputs have shape (64, 32)",
    "equinox_model": "the loss went from",
    "scan_over_layers": "the pipeline has 4 stages of 2 layers each",
    "mixture_of_experts": "experts of the last plan",
    "convolutions": "From data parallel on p3.16xlarge to auto (one weird trick) on p3.16xlarge",
    "checkpointed_training": "done",
    "serve_edge_and_cloud": "edge and cloud: <ServingPlan cameras by exact",
    "compare_plans": "From data parallel on p3.16xlarge to auto on p3.16xlarge",
}
"""A piece of what each example prints when it got to its end."""


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES} == set(SHOWN)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, printed_by_python: Callable[..., str], tmp_path: Path) -> None:
    assert SHOWN[path.stem] in printed_by_python(str(path), cwd=tmp_path, timeout=180)
