"""Settings of MaxText: what its axes and rules stand for, against runs written by hand and its own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml

import alpa_lite as al
from alpa_lite.planners.maxtext_settings import AXES, read_maxtext
from alpa_lite.planners.trainer_settings import TrainerSettings
from alpa_lite.schedule import GPipe

HOSTS = al.cluster("dgx-h100", num_hosts=4)  # four slices of eight GPUs
POD = replace(al.cluster("tpu-v5p", num_hosts=16), hosts_per_domain=8)  # two slices


def _step(state: Any, x: Any) -> Any:
    params, momentum = state

    def loss(params: Any) -> Any:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean((y - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value


def _plan(planner: Any, number: int, cluster: Any) -> al.Plan:
    def shaped(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [shaped(96, 96)] * 6
    given = {"cluster": cluster, "planner": planner, "num_microbatches": number}
    return al.plan(_step, (weights, weights), shaped(384, 96), **given)


def _read(text: str, cluster: Any = HOSTS) -> TrainerSettings:
    return read_maxtext(text, cluster)


def test_without_settings_a_run_is_what_base_yml_says() -> None:
    # Slices are data-parallel, the devices of one are FSDP, and layers recompute everything.
    found = _read("per_device_batch_size: 2")
    assert (found.replicas, found.shards, found.zero, found.remat) == (4, 8, 3, "full")
    assert (found.batch_size, found.samples, found.num_microbatches) == (64, 2, 1)


def test_a_command_line_and_a_file_say_the_same() -> None:
    text = "ici_fsdp_parallelism=2 ici_tensor_parallelism=4 per_device_batch_size=0.5 remat_policy=minimal"
    found = _read(f"train.py base.yml {text}")
    assert found == _read(text.replace("=", ": ").replace(" i", "\ni").replace(" p", "\np").replace(" r", "\nr"))
    assert (found.tensor, found.shards, found.replicas, found.sequence_parallel) == (4, 2, 4, False)
    # 16 samples on 32 devices, two for each of eight data-parallel ones.
    assert (found.batch_size, found.samples, found.remat) == (16, 2, "selective")


def test_the_hosts_of_a_tpu_slice_are_one_slice() -> None:
    found = _read("ici_fsdp_parallelism: -1", POD)
    assert (found.replicas, found.shards) == (2, POD.num_devices // 2)
    assert _read("num_slices: 16", POD).replicas == 16


def test_rules_say_what_axes_stand_for() -> None:
    degrees = "dcn_data_parallelism: 4\nici_fsdp_parallelism: 1\nici_expert_parallelism: 8\n"
    usual = _read(degrees)
    assert (usual.expert, usual.shards, usual.replicas, usual.zero) == (8, None, 1, 0)
    assert "whole there" in usual.notes[0]
    # Rules of the file replace those of base.yml by name; of several for a name the first counts.
    own = _read(degrees + "logical_axis_rules: [[embed, []], [embed, [expert]]]")
    assert not own.notes
    as_data = _read(degrees + "logical_axis_rules: [[exp, []], [embed, [expert]]]")
    assert (as_data.expert, as_data.shards, as_data.replicas, as_data.zero) == (1, 8, 4, 3)
    scattered = _read("ici_fsdp_parallelism: 2\nici_tensor_sequence_parallelism: 4")
    assert (scattered.tensor, scattered.sequence_parallel) == (4, True)
    positions = _read("ici_fsdp_parallelism: 1\nici_context_parallelism: 8\nper_device_batch_size: 0.125")
    # Weights are stored in parts over the context axis too.
    assert (positions.context, positions.zero, positions.samples) == (8, 3, 1)


def test_a_pipeline_runs_all_forward_passes_first() -> None:
    text = """
    dcn_pipeline_parallelism: 4
    dcn_data_parallelism: 1
    ici_fsdp_parallelism: 8
    per_device_batch_size: 4
    num_pipeline_microbatches: 8
    num_layers_per_pipeline_stage: 8
    base_num_decoder_layers: 32
    """
    found = _read(text)
    assert (found.pipeline, found.num_microbatches, found.schedule) == (4, 8, GPipe())
    assert (found.batch_size, found.samples, found.shards) == (128, 2, 8)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ici_fsdp_parallelism: 3", "the product of the ici_…_parallelism is 3, but there are 8 devices of a slice"),
        ("dcn_fsdp_parallelism: -1", "one of the dcn_…_parallelism may be -1"),
        ("ici_diloco_parallelism: 2", "ici_diloco_parallelism has no form"),
        ("per_device_batch_size: 0.01", "do not divide"),
        ("remat_policy: save_qkv_proj", "'save_qkv_proj' is none of full, minimal"),
        ("custom_mesh_and_rule: pure-fsdp", "put its logical_axis_rules into the settings"),
        ("dcn_pipeline_parallelism: 4\ndcn_data_parallelism: 1", "circular"),
        ("ici_fsdp_parallelism: 1\nici_tensor_parallelism: 4\nici_tensor_sequence_parallelism: 2", "use one of them"),
        ("ici_tensor_parallelism: 8\nici_fsdp_parallelism: 1\nlogical_axis_rules: [[activation_mlp, []]]", "neither"),
        ("ici_tensor_parallelism: [", "not YAML"),
    ],
)
def test_what_no_plan_is_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _read(text)


BASE_RULES = frozenset(
    "activation_batch activation_batch_attn activation_batch_moe activation_embed activation_embed_attn "
    "activation_embed_moe activation_embed_and_logits_batch activation_exp activation_heads "
    "activation_input_length_attn activation_kv_heads activation_length activation_length_attn "
    "activation_length_moe activation_mlp activation_mlp_moe activation_norm_length activation_norm_length_moe "
    "activation_q_length activation_vocab embed embed_moe embed_vocab exp heads kv_heads kv_lora mlp mlp_moe "
    "norm q_heads q_lora vocab".split()
)
"""Names of base.yml's rules."""


@pytest.mark.parametrize(
    ("planner", "number", "between", "within"),
    [
        (al.planners.Hybrid(data=32, zero=3), 1, {"fsdp": 4}, {"fsdp": 8}),
        (al.planners.Hybrid(data=32, zero=3, replicas=4), 2, {"data": 4}, {"fsdp": 8}),
        (al.planners.Hybrid(data=16, tensor=2, sequence_parallel=False), 1, {"data": 4}, {"data": 4, "tensor": 2}),
        (al.planners.Hybrid(pipeline=2, data=16, schedule=GPipe()), 4, {"pipeline": 2, "data": 2}, {"data": 8}),
    ],
)
def test_exported_degrees_are_cut_at_slices(
    planner: Any, number: int, between: dict[str, int], within: dict[str, int]
) -> None:
    plan = _plan(planner, number, HOSTS)
    found = yaml.safe_load(plan.export("maxtext"))
    for kind, degrees, total in (("dcn", between, 4), ("ici", within, 8)):
        said = {word: found[f"{kind}_{word}_parallelism"] for word in AXES.values()}
        assert {word: size for word, size in said.items() if size > 1} == degrees
        assert prod(said.values()) == total
    # MaxText's own product, which it rounds down.
    samples = int(32 * found["per_device_batch_size"]) * found.get("gradient_accumulation_steps", 1)
    assert samples == 384
    assert {name for name, _ in found["logical_axis_rules"]} == BASE_RULES


def test_what_maxtext_does_not_have_is_refused() -> None:
    refused = {
        (al.planners.Hybrid(pipeline=2, data=4), 4): "MaxText does not have schedule 1f1b",
        (al.planners.Hybrid(pipeline=2, data=4, schedule=GPipe()), 3): "3 micro-batches on 2 stages",
    }
    for (planner, number), why in refused.items():
        with pytest.raises(al.AlpaLiteError, match=why):
            _plan(planner, number, "dgx-1").export("maxtext")
    # Three data-parallel groups of devices across two slices.
    three = replace(HOSTS, num_hosts=6, hosts_per_domain=3)
    with pytest.raises(al.AlpaLiteError, match="pipeline axis of 3 devices lies across 2 slices"):
        _plan(al.planners.Hybrid(pipeline=3, data=16, schedule=GPipe()), 3, three).export("maxtext")
