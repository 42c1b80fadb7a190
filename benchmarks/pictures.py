"""Draw the pictures of the documentation: `python -m benchmarks.pictures` writes docs/pictures and docs/pages.

Drawings of plans are of one small perceptron on the eight devices of one p3.16xlarge, or of the tutorial's model there,
planned by hand, so that they are the same wherever they are drawn; charts are of numbers on pages and in kept results
(`benchmarks.statements`). A test compares the files with what this draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from pathlib import Path

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.inspection.page.drawings import (
    block_svg,
    cluster_svg,
    layers_svg,
    sharding_kind,
    sharding_words,
    timeline_svg,
)
from alpa_lite.inspection.page.elements import STYLE
from alpa_lite.inspection.page.serving_drawing import serving_svg
from alpa_lite.planners import Hybrid
from alpa_lite.schedule import (
    DualPipeV,
    EagerOneFOneB,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    Sequential,
    Wave,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from alpa_lite.serving import JellyBean, read_serving_problem
from alpa_lite.sharding.specs import Spec
from benchmarks import advice, asynchronous, collectives, matrix_products, searchers, statements, timelines, tutorial

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

_MODEL = MLP(in_features=1024, hidden=4096, out_features=1024, num_layers=8)
_BATCH_SIZE, _MICROBATCHES = 2048, 8


def plan_of(schedule: Schedule, pipeline: int) -> al.Plan:
    """Return the plan of the perceptron under a schedule, with as many groups of devices as `pipeline` says."""
    optimizer = make_optimizer()
    state = jax.eval_shape(lambda key: init_state(_MODEL.init(key), optimizer), jax.random.key(0))
    batch = {
        "inputs": jax.ShapeDtypeStruct((_BATCH_SIZE, _MODEL.in_features), jnp.float32),
        "targets": jax.ShapeDtypeStruct((_BATCH_SIZE, _MODEL.out_features), jnp.float32),
    }
    planner = Hybrid(pipeline=pipeline, schedule=schedule)
    step = make_train_step(_MODEL.loss_fn, optimizer)
    return al.plan(step, state, batch, cluster="p3.16xlarge", planner=planner, num_microbatches=_MICROBATCHES)


def _drawn(draw: Callable[[al.Plan], str], schedule: Schedule) -> str:
    return _file(draw(plan_of(schedule, 4)))


def blocks() -> str:
    """Return arrays on a mesh of 2 × 4 devices under several specs, each with its words."""
    sizes = {"data": 2, "model": 4}
    specs = [
        Spec(dims)
        for dims in (((), ()), (("data",), ()), ((), ("model",)), (("data",), ("model",)), (("data", "model"), ()))
    ]
    drawn = "".join(
        f'<g transform="translate({240 * number + 4} 4)"><g>{block_svg(spec, sizes)}</g>'
        f'<text x="0" y="52">{escape(str(spec))}: {sharding_kind(spec, sizes)}</text>'
        f'<text class="small" x="0" y="66">{escape(sharding_words(spec, sizes))}</text></g>'
        for number, spec in enumerate(specs)
    )
    return f'<svg viewBox="0 0 {240 * len(specs)} 72">{drawn}</svg>'


def _file(inner: str) -> str:
    """Return a drawing as a file of its own, with its style."""
    box = re.search(r'viewBox="([^"]+)"', inner)
    assert box is not None
    # Without what a page needs beside: a file is an image.
    rules = STYLE.replace("background: var(--page); padding: .5rem; ", "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="alpa-lite" viewBox="{box[1]}">\n'
        f"<style>{rules}</style>\n{inner}\n</svg>\n"
    )


def _chart(draw: Callable[[], str]) -> str:
    return _file(draw())


#: Charts of numbers, which take no planning.
CHARTS: Mapping[str, Callable[[], str]] = {
    "communication": statements.communication_svg,
    "convolutions": statements.convolutions_svg,
    "zero": statements.zero_svg,
    "gpipe-amoebanet": statements.amoebanet_svg,
    "megatron": statements.megatron_svg,
    "experts": statements.experts_svg,
    "alpa-gpt": partial(statements.alpa_svg, "gpt"),
    "alpa-moe": partial(statements.alpa_svg, "moe"),
    "alpa-wrn": partial(statements.alpa_svg, "wrn"),
    "matrix-products": matrix_products.chart,
    "all-reduce-bytes": collectives.bytes_svg,
    "all-reduce-rounds": collectives.rounds_svg,
    "searchers": searchers.chart,
    "advice": advice.advice_svg,
    "three-dimensions": statements.three_dimensions_svg,
    "asynchronous-updates": asynchronous.updates_svg,
    "asynchronous-seconds": asynchronous.seconds_svg,
    "tutorial-simulated": partial(tutorial.timeline_svg, "simulated"),
    "tutorial-measured": partial(tutorial.timeline_svg, "measured"),
    **{f"timelines-{model.lower()}": partial(timelines.timeline_svg, model) for model in timelines.MODELS},
}
#: The name of each picture, and what draws it.
PICTURES: Mapping[str, Callable[[], str]] = {
    **{name: partial(_chart, draw) for name, draw in CHARTS.items()},
    "sequential": partial(_drawn, timeline_svg, Sequential()),
    "gpipe": partial(_drawn, timeline_svg, GPipe()),
    "1f1b": partial(_drawn, timeline_svg, OneFOneB()),
    "eager-1f1b": partial(_drawn, timeline_svg, EagerOneFOneB()),
    "interleaved": partial(_drawn, timeline_svg, Interleaved1F1B(num_chunks=2)),
    "zero-bubble": partial(_drawn, timeline_svg, ZeroBubbleH1()),
    "zero-bubble-v": partial(_drawn, timeline_svg, ZeroBubbleV()),
    "dualpipe-v": partial(_drawn, timeline_svg, DualPipeV()),
    "wave": partial(_drawn, timeline_svg, Wave()),
    "tutorial-plan": lambda: _file(timeline_svg(tutorial.described_plan())),
    "devices": partial(_drawn, cluster_svg, OneFOneB()),
    "layers": partial(_drawn, layers_svg, OneFOneB()),
    "blocks": lambda: _file(blocks()),
    "serving": lambda: _file(serving_svg(JellyBean().plan(read_serving_problem("vqa-medium"), 56))),
}


def main() -> None:
    """Write all pictures, and the page of a plan that the tutorial shows."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
    tutorial.PLAN_PAGE.write_text(tutorial.plan_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
