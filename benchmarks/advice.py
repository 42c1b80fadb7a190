"""`alpa-lite advise` beside published recipes: `python -m benchmarks.advice`.

For each pair of a model and a cluster: the CPU seconds that the command takes, its fastest plan, and the plan that a
published recipe uses, predicted in the same way and as it was measured. Recipes are settings of their trainer.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import alpa_lite as al
from alpa_lite.api.advice import TRAINERS
from alpa_lite.api.parallelize import parallelize
from alpa_lite.cli.models.named_models import model_named
from alpa_lite.planners.trainer_configuration import TrainerConfiguration, settings_of
from alpa_lite.text import show_count
from benchmarks.charts import Series, bars_svg

RESULTS = Path(__file__).parent / "results" / "advice.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A published run: the settings of its trainer, its measured seconds per step, and where they were published."""

    model: str
    cluster: str
    batch_size: int
    seq_len: int
    trainer: str
    settings: str
    measured_seconds: float
    source: str


_OPTIMIZER = "--use-distributed-optimizer"

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        model="llama-70b",
        cluster="dgx-h100:16",
        batch_size=256,
        seq_len=8192,
        trainer="maxtext",
        settings="ici_fsdp_parallelism=8 dcn_fsdp_parallelism=16 dcn_data_parallelism=1 per_device_batch_size=2",
        measured_seconds=15.563,
        source="NVIDIA/dgxc-benchmarking 25.04.01, maxtext/README_70b.md",
    ),
    Recipe(
        model="llama-8b",
        cluster="dgx-h100:8",
        batch_size=1024,
        seq_len=8192,
        trainer="megatron",
        settings=f"--context-parallel-size 2 --micro-batch-size 1 --global-batch-size 1024 {_OPTIMIZER}",
        measured_seconds=12.33,
        source="NVIDIA/dgxc-benchmarking 25.04.01, llama3.1/README.md",
    ),
    Recipe(
        model="gpt-175b",
        cluster="dgx-a100:32",
        batch_size=2048,
        seq_len=2048,
        trainer="megatron",
        settings="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --sequence-parallel "
        f"--num-virtual-stages-per-pipeline-rank 12 --micro-batch-size 1 --global-batch-size 2048 {_OPTIMIZER}",
        measured_seconds=142.002,
        source="NVIDIA/NeMo-Megatron-Launcher, README and launcher_scripts/conf/training",
    ),
    Recipe(
        model="gpt-145b",
        cluster="dgx-a100:192",
        batch_size=2304,
        seq_len=2048,
        trainer="megatron",
        settings="--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --micro-batch-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2304 --recompute-granularity full",
        measured_seconds=24.8174,
        source="Narayanan et al. 2021, table 1",
    ),
    Recipe(
        model="llama-8b",
        cluster="tpu-v6e:8",
        batch_size=320,
        seq_len=8192,
        trainer="maxtext",
        settings="ici_fsdp_parallelism=64 dcn_data_parallelism=1 per_device_batch_size=5",
        measured_seconds=5.652,
        source="AI-Hypercomputer/tpu-recipes, training/trillium/Llama3.1-8B-MaxText",
    ),
    Recipe(
        model="mixtral-8x7b",
        cluster="tpu-v6e:32",
        batch_size=3072,
        seq_len=4096,
        trainer="maxtext",
        settings="ici_fsdp_parallelism=256 dcn_data_parallelism=1 per_device_batch_size=12",
        measured_seconds=13.484,
        source="AI-Hypercomputer/tpu-recipes, training/trillium/Mixtral-8x7B-MaxText",
    ),
)


def measured(recipe: Recipe) -> dict[str, Any]:
    """Return what the command says, the CPU seconds that it took, and the predicted step of the recipe."""
    sizes = ("--batch", str(recipe.batch_size), "--seq", str(recipe.seq_len))
    words = ("advise", recipe.model, "--cluster", recipe.cluster, *sizes, "--json")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run(
        [sys.executable, "-m", "alpa_lite.cli", *words],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(said.stdout)
    best = next(each for each in found["families"] if each["name"] == found["fastest"])
    step, args = model_named(recipe.model).training(recipe.batch_size, recipe.seq_len)
    traced = parallelize(step, cluster=recipe.cluster).trace(*args)
    planner = TrainerConfiguration(trainer=recipe.trainer, settings=recipe.settings)
    try:
        plan = planner.plan(traced.request(al.cluster(recipe.cluster), backend=TRAINERS))
        predicted, problem = plan.prediction.step_seconds, ""
    # Recipes that move activations to the host have no plan here that fits.
    except al.errors.InfeasibleError as error:
        predicted, problem = None, str(error)
    return {
        **asdict(recipe),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "families": {
            each["name"]: each["decisions"]["degrees"] for each in found["families"] if each["plan"] is not None
        },
        "best": best["decisions"],
        "best_seconds": best["plan"]["step_seconds"],
        "recipe_degrees": _degrees(recipe),
        "recipe_seconds": predicted,
        "recipe_problem": problem,
        "cut_short": [each["name"] for each in found["families"] if each["cut_short"]],
    }


def _degrees(recipe: Recipe) -> str:
    """Return the degrees of a recipe in words."""
    found = settings_of(recipe.trainer, recipe.settings, al.cluster(recipe.cluster))
    words = [f"{n} {name}" for name in ("pipeline", "tensor", "context") if (n := getattr(found, name)) > 1]
    chunks = found.schedule.stages_per_processor
    words += [f"{chunks} chunks"] if chunks > 1 else []
    return ", ".join([*words, f"ZeRO-{found.zero}" if found.zero else "no ZeRO"])


def advice_svg() -> str:
    """Draw the steps of the results in percent of the measured step of each recipe."""
    rows: list[Mapping[str, Any]] = json.loads(RESULTS.read_text())
    # `dgx-h100:16` as h100, so that labels do not run into each other.
    names = [f"{row['model']}, {row['cluster'].partition(':')[0].rpartition('-')[2]}" for row in rows]

    def relative(key: str) -> tuple[float | None, ...]:
        return tuple(None if row[key] is None else 100 * row[key] / row["measured_seconds"] for row in rows)

    series = (
        Series(name="recipe, measured", values=relative("measured_seconds")),
        Series(name="recipe, predicted", values=relative("recipe_seconds")),
        Series(name="advised, predicted", values=relative("best_seconds")),
    )
    return bars_svg(names, series, unit="%")


def advice_table() -> list[str]:
    """Return the results as lines of a table for the documentation."""
    head = "| model | cluster | batch | advised | s | recipe | s, predicted | s, measured | CPU s |"
    lines = [head, "| --- | --- | --: | --- | --: | --- | --: | --: | --: |"]
    for row in json.loads(RESULTS.read_text()):
        recipe = "does not fit" if row["recipe_seconds"] is None else f"{row['recipe_seconds']:.3g}"
        cells = (
            row["model"],
            row["cluster"].replace(":", " × "),
            f"{row['batch_size']} × {row['seq_len']}",
            f"{row['best']['degrees']}, {show_count(int(row['best']['micro-batches']), 'micro-batch')}",
            f"{row['best_seconds']:.3g}",
            row["recipe_degrees"],
            recipe,
            f"{row['measured_seconds']:.3g}",
            f"{row['cpu_seconds']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure all pairs and write the results."""
    rows = list[dict[str, Any]]()
    for recipe in RECIPES:
        rows.append(measured(recipe))
        row = rows[-1]
        known = row["recipe_seconds"] or math.nan
        print(
            f"{recipe.model} on {recipe.cluster}: {row['cpu_seconds']:.1f} s; {row['best']['degrees']} "
            f"{row['best_seconds']:.3g} s; recipe {known:.3g} s, {recipe.measured_seconds} s measured",
            flush=True,
        )
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
