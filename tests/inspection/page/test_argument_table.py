"""The table of arguments: shapes, whole and per device, bytes, and plans of earlier versions without them."""

import re
from dataclasses import replace

import numpy as np

from alpa_lite.inspection.page.argument_table import parameter_table, sharding_sentences
from alpa_lite.inspection.text.groups import arguments_of
from alpa_lite.plan.plan import ArrayShape, Plan
from alpa_lite.sharding.specs import Spec
from alpa_lite.text import show_bytes
from tests.inspection.markup import parse


def row_of(text, pattern):
    """The words of a row."""
    (row,) = [row for row in re.findall(r"<tr .*?</tr>", text, re.DOTALL) if f"<code>{pattern}</code>" in row]
    return " ".join("".join(f" {word} " for word in parse(row).words).split())


def test_shapes_whole_and_per_device(tensor_plan):
    arguments = [each for each in arguments_of(tensor_plan).plain if each.num_shards > 1]
    (stage,) = tensor_plan.stages
    assert arguments
    for each in arguments:
        # Independent of `local_shape`: NumPy cuts an array of that shape.
        whole, sizes = np.empty(each.shape.dims, np.bool_), stage.mesh_shape.axis_sizes
        for dim, axes in enumerate(each.spec.dims):
            whole = np.split(whole, int(np.prod([sizes[axis] for axis in axes])), axis=dim)[0]
        assert each.block == ArrayShape(dims=whole.shape, dtype="float32")
        assert each.block.bytes == 4 * whole.size


def test_rows(tensor_plan):
    text = parameter_table(tensor_plan)
    batch = row_of(text, "batch/inputs")
    assert "2048 × 1024 float32" in batch and "1024 × 1024" in batch and f"{show_bytes(4 * 2**20)} 1/2" in batch
    assert "scalar int32" in row_of(text, "state/step")


def test_arrays_of_several_shapes_are_one_row(tensor_plan):
    (stage,) = tensor_plan.stages
    name = next(name for name in stage.specs if name.startswith("state/params") and len(stage.shapes[name].dims) == 2)
    alike = {re.sub(r"\d+", "7", name, count=1): ArrayShape(dims=(8, 8), dtype="float32")}
    changed = replace(
        stage,
        specs={**stage.specs, **dict.fromkeys(alike, stage.specs[name])},
        shapes={**stage.shapes, **alike},
    )
    assert "and 1 other" in parameter_table(replace(tensor_plan, stages=(changed,)))


def test_plans_of_earlier_versions_have_no_shapes(tensor_plan):
    data = tensor_plan.to_json()
    for stage in data["stages"]:
        del stage["shapes"]
    old = Plan.from_json(data)
    text = parameter_table(old)
    assert "1/2" in row_of(text, "batch/inputs") and "2048" not in row_of(text, "batch/inputs")
    assert all(argument.shape is None for argument in arguments_of(old).all)


def test_optimizer_state_is_told_in_one_line(zero_plan):
    assert re.search(r"\d+ arrays of optimizer state, \d+ of them sharded differently", parameter_table(zero_plan))


def sentences(plan):
    return sharding_sentences(plan, arguments_of(plan))


def test_sentences_come_first(pipeline_plan, tensor_plan, zero_plan):
    assert sentences(pipeline_plan)[0].endswith(": all replicated.")
    assert "Optimizer state: like its parameters." in sentences(pipeline_plan)
    assert sentences(pipeline_plan)[-1] == "Batch, 16.0 MiB: all in 4 parts."
    assert re.fullmatch(r"Parameters, .* in 4 parts.*\.", sentences(tensor_plan)[0])
    assert not any("like its parameters" in text for text in sentences(zero_plan))
    text = parameter_table(tensor_plan)
    assert text.index("Parameters, ") < text.index("<table")


def test_a_share_that_rounds_to_all_is_told_in_bytes(tensor_plan):
    (stage,) = tensor_plan.stages
    sizes = {"params/a": 10_000_000, "params/b": 25}
    changed = replace(
        stage,
        specs={"params/a": Spec((("model",),)), "params/b": Spec(((),))},
        shapes={name: ArrayShape(dims=(size,), dtype="float32") for name, size in sizes.items()},
    )
    assert sentences(replace(tensor_plan, stages=(changed,)))[0].endswith(": all but 100 B in 4 parts.")
