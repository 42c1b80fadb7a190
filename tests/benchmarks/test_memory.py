"""The memory benchmark: XLA's account of a small model, and peaks that were measured elsewhere."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.planners import DataParallel, Hybrid, Planner
from benchmarks import absent_devices, memory
from benchmarks.published import peaks
from tests.benchmarks import memory_programs

PLANS = {"data parallel": (DataParallel(), 1), "pp2 × dp2 × tp2": (Hybrid(pipeline=2, data=2, tensor=2), 4)}


@pytest.fixture(scope="module")
def rows(devices) -> list[memory.Row]:
    batch = {name: jax.ShapeDtypeStruct((512, 128), jnp.float32) for name in ("inputs", "targets")}
    case = memory.Case.of_model("MLP", MLP(in_features=128, hidden=256, out_features=128, num_layers=4), batch)
    return memory.run([case], PLANS, lambda _: None)


def test_predictions_are_near_what_xla_allocates(rows):
    assert [(row.plan, row.stage) for row in rows] == [("data parallel", 0), *(("pp2 × dp2 × tp2", i) for i in (0, 1))]
    for row in rows:
        assert 0.8 < row.ratio < 1.3, row


def test_gradients_are_counted_before_and_after_they_are_reduced_on_virtual_devices(rows):
    row = rows[0]
    parameters = row.state_bytes / 3
    # All of them are combined into one all_reduce, whose results have buffers of their own.
    assert row.xla_temporary_bytes == pytest.approx(2 * parameters, rel=0.02)
    assert row.ratio == pytest.approx(1.0, abs=0.02)


def test_steps_of_the_benchmarks_on_one_device():
    (case,) = memory.cases(["mlp-tiny"], [])
    (row,) = memory.run([case], {"one device": memory.PLANS["one device"]}, lambda _: None)
    mean, worst = memory.mean_and_worst_error([row])
    assert mean == worst == abs(row.ratio - 1.0)
    assert 0.7 < row.ratio < 1.3, row


@pytest.mark.parametrize(("model", "planner"), [("CNN", DataParallel()), ("CNN", Hybrid(tensor=2)), ("MLP", None)])
def test_the_cpu_backend_stores_inputs_of_relus_and_indices_of_maxima(devices, model: str, planner: Planner | None):
    (case,) = memory.cases([model], [])
    plan = (DataParallel(), 1) if planner is None else (planner, 1)
    (row,) = memory.run([case], {"one device" if planner is None else "plan": plan}, lambda _: None)
    assert row.ratio == pytest.approx(1.0, abs=0.06), row


@pytest.mark.parametrize(
    ("program", "plan"), [("gelu", "FSDP"), ("words", "FSDP"), ("attention", "one device"), ("normed", "Megatron")]
)
def test_gathered_weights_are_moved_into_place_and_what_is_reduced_is_spread(devices, program: str, plan: str):
    (case,) = (case for case in memory_programs.cases() if case.name == program)
    (row,) = memory.run([case], {plan: memory_programs.PLANS[plan]}, lambda _: None)
    assert row.ratio == pytest.approx(1.0, abs=0.06), row


@pytest.mark.parametrize(("program", "plan"), [("experts", "Megatron"), ("recomputed", "FSDP")])
def test_results_are_laid_out_anew_before_they_are_scattered_along_an_inner_dim(devices, program: str, plan: str):
    (case,) = (case for case in memory_programs.cases() if case.name == program)
    (row,) = memory.run([case], {plan: memory_programs.PLANS[plan]}, lambda _: None)
    # They were 0.70 and 0.91.
    assert row.ratio == pytest.approx(1.0, abs=0.03), row


def test_the_last_stage_fuses_across_its_passes(devices):
    (case,) = memory.cases(["gpt-tiny"], [])
    first, last = memory.run([case], {"pipeline of 2": memory.PLANS["pipeline of 2"]}, lambda _: None)
    assert first.ratio == pytest.approx(1.0, abs=0.05), first
    # As two programs, it was 1.22.
    assert last.ratio == pytest.approx(1.0, abs=0.05), last


def test_gradients_that_a_stage_receives_are_there_once_for_the_whole_backward_pass(devices):
    (case,) = memory.cases(["MLP"], [])
    rows = memory.run([case], {"auto": memory.PLANS["auto"]}, lambda _: None)
    for row in rows:
        # They were 1.16 in the first stage, and 0.93 in the third. What a backward pass needs is not counted in the
        # forward pass, when most micro-batches are held.
        assert row.ratio == pytest.approx(1.0, abs=0.03), row


def test_the_cpu_backend_adds_to_partial_sums_in_other_memory(devices):
    (case,) = memory.cases(["mlp-tiny"], [])
    for plan in ("pp2 × dp2 × tp2", "pipeline of 2", "data parallel, 4 micro-batches"):
        for row in memory.run([case], {plan: memory.PLANS[plan]}, lambda _: None):
            # Both stages of pp2 × dp2 × tp2 were 0.89.
            assert row.ratio == pytest.approx(1.0, abs=0.05), row


@pytest.mark.slow
def test_ten_other_programs(devices):
    rows = memory.run(memory_programs.cases(), memory_programs.PLANS, lambda _: None)
    assert len(rows) == 40
    mean, _ = memory.mean_and_worst_error(rows)
    low = [row for row in rows if row.ratio < 0.9]
    # When kernels ran in the order of the ops it was 0.11, and 15 of the predictions were more than 10 % too low.
    assert mean < 0.055
    assert len(low) <= 4, low


def test_the_account_of_a_step_that_is_one_executable(rows):
    row = rows[0]
    batch = 2 * 4 * 512 * 128 / 8
    assert row.xla_resident_bytes == pytest.approx(row.state_bytes + batch, rel=0.01)
    assert row.xla_bytes == row.xla_resident_bytes + row.xla_output_bytes + row.xla_temporary_bytes
    # The batch is saved for the backward pass, and counted once.
    assert row.saved_bytes > batch
    parts = row.state_bytes + row.accumulator_bytes + row.saved_bytes + row.temporary_bytes
    assert row.predicted_bytes <= parts
    assert row.predicted_bytes == pytest.approx(row.xla_bytes, rel=1e-3)


def test_the_table(rows):
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(memory.rendered(rows))
    assert "pp2 × dp2 × tp2, stage 1" in captured.get()


def test_bias_and_spread():
    bias, spread = peaks.bias_and_spread([2.0, 0.5])
    assert (bias, spread) == (pytest.approx(1.0), pytest.approx(2.0))


#: Under the prices fitted to published runs the search stores less than Alpa did: 11.00 GiB, 11.4 % below.
NOT_YET = pytest.mark.xfail(reason="the plan is another one under the present prices", strict=True)


@pytest.mark.parametrize(
    ("family", "sharding", "data", "gib"),
    [("GPT", "auto", 1, 9.54), pytest.param("GPT", "zero-2", 4, 12.42, marks=NOT_YET), ("MoE", "auto", 1, 8.33)],
)
def test_peaks_that_were_measured_on_gpus(family: peaks.Family, sharding: peaks.Sharding, data: int, gib: float):
    """GiB per V100, alpa-projects/alpa, branch osdi22_artifact, results_intra_ablation_ref.tsv.

    Runs whose plan is ours too are predicted within 7 %; what an allocator rounds up and cuDNN keeps is not modelled.
    """
    (run,) = (
        run for run in peaks.runs() if (run.family, run.sharding, run.data, run.model) == (family, sharding, data, 1)
    )
    assert run.measured_gib == gib
    assert peaks.predicted(run).predicted_gib == pytest.approx(gib, rel=0.1)


def test_tpu_needs_its_compiler(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.absent_devices.util.find_spec", lambda name: None)
    assert memory.main(["--tpu", "v5e:2x4", "--model", "MLP"]) == 1
    assert "pip install libtpu" in capsys.readouterr().err


def test_gpus_need_their_compiler(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.absent_devices.util.find_spec", lambda name: None)
    assert memory.main(["--gpu", "h100", "--model", "MLP", "--devices", "0"]) == 1
    assert 'pip install "jax[cuda12]' in capsys.readouterr().err


def check_compiled_perceptron(judge: memory.Judge) -> None:
    batch = {name: jax.ShapeDtypeStruct((4096, 2048), jnp.float32) for name in ("inputs", "targets")}
    case = memory.Case.of_model("MLP", MLP(in_features=2048, hidden=4096, out_features=2048, num_layers=2), batch)
    (row,) = memory.run([case], {"data parallel": (DataParallel(), 1)}, lambda _: None, judge)
    batch_bytes = 2 * 4 * 4096 * 2048 / 8
    assert row.xla_resident_bytes == pytest.approx(row.state_bytes + batch_bytes, rel=0.01)
    assert row.xla_temporary_bytes > 0


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_programs_are_compiled_for_tpus():
    check_compiled_perceptron(memory.TpuJudge("v5e:2x4"))


@pytest.mark.skipif(util.find_spec("jax_plugins") is None, reason="JAX's plugin for CUDA is not installed")
@pytest.mark.parametrize("kind", absent_devices.GPUS)
def test_programs_are_compiled_for_gpus(kind: str):
    check_compiled_perceptron(memory.GpuJudge(kind))


@pytest.mark.parametrize("large", [False, True])
def test_large_cases_are_the_same_models(large):
    found = memory.cases(memory.OWN_MODELS, ["none", "full"], large=large)
    assert [case.name for case in found] == ["transformer, none", "transformer, full", "MLP", "CNN"]


@pytest.mark.parametrize(
    ("name", "mean", "worst"),
    [("memory", "3 %", "21 %"), ("memory_gpu", "5 %", "33 %"), ("memory_tpu", "19 %", "64 %")],
)
def test_the_page_states_the_kept_figures(name: str, mean: str, worst: str):
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    text = (root / "docs" / "cost-model.md").read_text(encoding="utf-8")
    errors = [abs(row["ratio"] - 1.0) for row in rows]
    assert f"The mean error is {mean}, the largest {worst}" in text
    assert (f"{100 * sum(errors) / len(errors):.0f} %", f"{100 * max(errors):.0f} %") == (mean, worst)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("MLP", "one device"),
        ("MLP", "pipeline of 2"),
        ("transformer", "one device"),
        ("transformer", "data parallel"),
        ("transformer", "FSDP"),
        ("MLP", "Megatron"),
        ("CNN", "one device"),
    ],
)
def test_predictions_for_gpus_are_near_what_their_compiler_allocates(model: str, plan: str):
    """Bytes of XLA:GPU for an H100 from `benchmarks/results/memory_gpu.json`."""
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks" / "results" / "memory_gpu.json").read_text(encoding="utf-8"))["rows"]
    (case,) = memory.cases([model], ["full"], large=True)
    planner, count = memory.PLANS[plan]
    cluster = absent_devices.gpu_cluster("h100", 1 if plan == "one device" else 8)
    predicted = memory.lowered_plan(case, planner, count, cluster).planned.last_plan.prediction.peak_bytes
    allocated = [row["xla_bytes"] for row in rows if (row["model"], row["plan"]) == (case.name, plan)]
    # The CNN was 0.72 without the indices of maxima, the transformer 0.81 with kernels of one result, under FSDP 0.91
    # with weights that are gathered for each reader. With gradients of weights as they stand the MLP was 0.84.
    assert predicted == pytest.approx(allocated, rel=0.07)


def test_sums_of_products_that_all_devices_compute_whole_are_not_reduced(devices):
    (case,) = memory.cases(["mlp-tiny"], [])
    rows = memory.run([case], {"auto": memory.PLANS["auto"]}, lambda _: None)
    for row in rows:
        # They were 1.18 and 1.25 in the second and third stage.
        assert row.ratio == pytest.approx(1.0, abs=0.03), row


def test_small_reductions_spread_nothing(devices):
    (case,) = memory.cases(["llama-tiny"], [])
    rows = memory.run([case], {"pp2 × dp2 × tp2": memory.PLANS["pp2 × dp2 × tp2"]}, lambda _: None)
    for row in rows:
        # The last stage was 1.10.
        assert row.ratio == pytest.approx(1.0, abs=0.06), row


def test_weights_are_gathered_one_ahead_across_loops_of_one_trip(devices):
    (case,) = memory.cases(["gpt-tiny"], [])
    (row,) = memory.run([case], {"FSDP": memory.PLANS["FSDP"]}, lambda _: None)
    # It was 1.12 MB, when each loop gathered for itself.
    assert row.xla_bytes < 1.03e6
    assert row.ratio == pytest.approx(1.0, abs=0.06), row


@pytest.mark.parametrize("plan", ["one device", "Megatron"])
def test_elements_that_are_searched_for_maxima_are_numbered_from_the_start(devices, plan: str):
    (case,) = memory.cases(["vgg16-tiny"], [])
    (row,) = memory.run([case], {plan: memory.PLANS[plan]}, lambda _: None)
    # They were 0.79 and 0.81: the numbers of all pooled arrays wait for their search.
    assert row.ratio == pytest.approx(1.0, abs=0.04), row


@pytest.mark.parametrize("model", ["vgg16-tiny", "alexnet-tiny", pytest.param("wrn-tiny", marks=pytest.mark.slow)])
def test_kernels_that_are_gathered_to_be_laid_out_anew_wait_for_those_before_them(devices, model: str):
    (case,) = memory.cases([model], [])
    (row,) = memory.run([case], {"FSDP": memory.PLANS["FSDP"]}, lambda _: None)
    # They were 1.18, 1.10 and 1.61: kernels that are reversed counted as gathered when the program begins.
    assert row.ratio == pytest.approx(1.0, abs=0.07), row


@pytest.mark.parametrize("program", ["mlp-tiny", "moe-tiny", "autoencoder", "words"])
def test_gradients_are_whole_until_they_are_scattered(devices, program: str):
    others = {case.name: case for case in memory_programs.cases()}
    case = others[program] if program in others else memory.cases([program], [])[0]
    (row,) = memory.run([case], {"FSDP": memory.PLANS["FSDP"]}, lambda _: None)
    # They were 1.07, 0.92, 0.88 and 0.98, and 0.89, 0.92, 0.88 and 0.85 without the whole gradients alone.
    assert row.ratio == pytest.approx(1.0, abs=0.05), row


@pytest.mark.parametrize(("policy", "most"), [("selective", 8.5e7), ("dots", 1.0e8)])
def test_what_is_recomputed_waits_for_the_backward_pass(devices, policy: str, most: float):
    (case,) = memory.cases(["transformer"], [policy])
    last = memory.run([case], {"auto": memory.PLANS["auto"]}, lambda _: None)[-1]
    # It was 1.26e8 with "dots", while barriers waited for each other and kept what they name anew.
    assert last.xla_temporary_bytes < most, last
    # It was 1.53 with "selective", as if all layers were recomputed at once.
    assert last.ratio == pytest.approx(1.0, abs=0.05), last


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("bert-tiny", "one device"),
        ("bert-tiny", "data parallel"),
        ("bert-tiny", "Megatron"),
        ("gpt-tiny", "one device"),
        ("llama-tiny", "one device"),
        ("wrn-tiny", "one device"),
    ],
)
def test_the_library_of_reductions_reads_arrays(devices, model: str, plan: str):
    (case,) = memory.cases([model], [])
    (row,) = memory.run([case], {plan: memory.PLANS[plan]}, lambda _: None)
    # They were 0.91, 0.91, 0.88, 1.06, 1.13 and 1.14.
    assert row.ratio == pytest.approx(1.0, abs=0.04), row


def test_kernels_of_many_rows_go_on_after_a_reduction(devices):
    (case,) = memory.cases(["transformer"], ["full"])
    for plan in ("one device", "Megatron"):
        (row,) = memory.run([case], {plan: memory.PLANS[plan]}, lambda _: None)
        # They were 0.86 and 0.95 as if each reduction ended its kernel.
        assert row.ratio == pytest.approx(1.0, abs=0.06), row


def test_the_loss_waits_for_its_turn_after_the_gradient_of_the_logits(devices):
    (case,) = (case for case in memory_programs.cases() if case.name == "words")
    (row,) = memory.run([case], {"one device": memory.PLANS["one device"]}, lambda _: None)
    # It was 0.79.
    assert row.ratio == pytest.approx(1.0, abs=0.02), row


@pytest.mark.slow
def test_a_task_of_weight_gradients_makes_all_of_them_before_it_adds_them_up(devices):
    (case,) = memory.cases(["nmt-tiny"], [])
    rows = memory.run([case], {"auto": memory.PLANS["auto"]}, lambda _: None)
    for row in rows:
        if row.state_bytes > 1e5:
            # They were 0.88 and 0.86.
            assert row.ratio == pytest.approx(1.0, abs=0.08), row
