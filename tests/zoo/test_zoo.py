"""Real training programs equal `jax.jit` under every kind of plan, after two steps and in every leaf.

By default some programs of each family run under one planner each, and the planners take turns. The long tests run all
pairs, and two micro-batches: a step that is no sum over its samples must then be refused, in a sentence and by no other
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

import alpa_lite as al
from tests.end_to_end.cases import parallel
from tests.zoo import compare
from tests.zoo.registry import PROGRAMS, load

load()

TURNS = ("auto", "data_parallel", "fsdp", "megatron", "pipeline_2", "hybrid")
DEFAULT = (
    "llama_loop llama_scan llama_bf16 experts_by_capacity experts_by_sorting translation_by_token vision_transformer "
    "residual_network wide_residual_network unet_by_resizing lstm_language_model selective_state_space "
    "denoising_diffusion adversarial_pair linen_transformer_scanned linen_convolutions_with_batch_norm nnx_transformer "
    "nnx_network_with_batch_norm_and_dropout equinox_transformer equinox_convolutions adafactor lion lamb sgd_nesterov "
    "muon multi_steps apply_if_finite shampoo_like sharpness_aware accumulate_in_scan accumulate_in_fori_loop "
    "accumulate_in_scan_of_given_parts lstm_carrying_its_state ensemble_by_vmap private_gradients "
    "skip_connection_by_flag activation_by_switch fixed_point_without_gradient implicit_layer recompute_saving_names "
    "recompute_in_scan_by_name dynamic_loss_scale contrastive_image_text clipped_policy hypergradient meta_learning "
    "host_callback printing decode_one_token generate_in_fori_loop half_precision_with_loss_scale "
    "operation_while_of_each_sample adapters_on_weights_of_four_bits momentum_of_eight_bits complex_weights "
    "leaves_without_elements"
).split()
"""One or a few programs of each family; the rest is for the long tests."""
REFUSALS = (al.errors.NonAdditiveError, al.errors.BatchError, al.errors.TraceError)


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiling takes most of the time, and XLA's optimisations half of that."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def check(name: str, planner: str, num_microbatches: int) -> None:
    """The program gives what `jax.jit` gives, up to rounding."""
    program = PROGRAMS[name]()
    step = parallel(program, planner, num_microbatches)
    got = program.run(step)
    quotient, where = compare.worst(got, name)
    assert quotient <= 1, f"{where} is off by {quotient:.2g} times what rounding explains"


@pytest.mark.parametrize(("name", "planner"), [(name, TURNS[i % len(TURNS)]) for i, name in enumerate(DEFAULT)])
def test_program(name: str, planner: str, devices: Any) -> None:
    check(name, planner, 1)


@pytest.mark.long
@pytest.mark.parametrize("planner", TURNS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_under_every_kind_of_plan(name: str, planner: str, devices: Any) -> None:
    check(name, planner, 1)


@pytest.mark.long
@pytest.mark.parametrize("planner", TURNS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_in_micro_batches_is_equal_or_refused(name: str, planner: str, devices: Any) -> None:
    program = PROGRAMS[name]()
    try:
        parallel(program, planner, 2).trace(program.state, *program.inputs).plan()
    except REFUSALS as refusal:
        assert str(refusal)
    else:
        check(name, planner, 2)


@pytest.mark.parametrize("planner", ["data_parallel", "hybrid"])
def test_what_a_step_prints_is_printed_once(planner: str, devices: Any, capfd: pytest.CaptureFixture[str]) -> None:
    program = PROGRAMS["printing"]()
    program.run(parallel(program, planner))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss") == 2
