"""Compute transformer memory in closed form: model states, layer activations, micro-batches in flight.

Planners predict memory by value lifetimes; these formulas of the literature serve estimates and cross-checks.

Model states under ZeRO (Rajbhandari et al., SC 2020, arXiv 1910.02054, section 3 and figure 1): P parameters; p, g and
K bytes of parameter, gradient and optimizer state for each of them; N data-parallel devices:

    stage 0 (plain)                     (p + g + K) P
    stage 1 (optimizer sharded)         (p + g) P + K P / N
    stage 2 (+ gradients)               p P + (g + K) P / N
    stage 3 (+ parameters)              (p + g + K) P / N          (all four: model_states_bytes)

Saved activations of one layer in half precision, in bytes (Korthikanti et al., MLSys 2023, arXiv 2205.05198, table 2):
b sequences of s tokens, width h, a heads, t tensor-parallel devices, with dropout, a saved softmax:

    tensor parallel                     s b h (10 + 24/t + 5 a s / (h t))
    + sequence parallel                 s b h (34 + 5 a s / h) / t
    selective recomputation             the same without 5 a s / h
    full recomputation                  2 s b h                    (all four: layer_activation_bytes)

Micro-batches between forward and backward on stage i of p, of m (Huang et al., NeurIPS 2019; Narayanan et al., SC'21):

    GPipe                               m
    1F1B                                min(p - i, m)
    interleaved, v chunks each          min(2 (p - i - 1) + (v - 1) p + 1, v m) / v          (microbatches_in_flight)
"""

from __future__ import annotations

from typing import Literal, get_args

from cost_models.checks import CostModelError, require_amount, require_count

LayerRecompute = Literal["none", "selective", "full"]
"""What the backward pass recomputes: nothing, the attention core, or the layer from its input."""

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]


def model_states_bytes(
    num_parameters: float,
    stage: int,
    num_data_parallel: int,
    optimizer_bytes: float = 12,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
) -> float:
    """Return the bytes per device of parameters, gradients and optimizer state.

    Args:
        num_parameters: number of parameters in the part of the model that the devices share.
        stage: ZeRO stage, 0 to 3.
        num_data_parallel: number of devices over which the states are sharded.
        optimizer_bytes: bytes per parameter; 12 is mixed-precision Adam (float32 copy, momentum, variance).
        parameter_bytes, gradient_bytes: bytes per parameter; 2 in half precision.

    Raises:
        CostModelError: an unknown stage, a negative amount, no device.
    """
    for what, value in (("num_parameters", num_parameters), ("optimizer_bytes", optimizer_bytes)):
        require_amount(what, value, advice="count what the model holds")
    require_count("num_data_parallel", num_data_parallel, advice="count the devices that hold the same model")
    if stage not in (0, 1, 2, 3):
        raise CostModelError(f"The ZeRO stage is {stage!r}, but only 0, 1, 2 and 3 exist: choose one of them.")
    sizes_by_first_sharded_stage = ((3, parameter_bytes), (2, gradient_bytes), (1, optimizer_bytes))
    return num_parameters * sum(
        size / num_data_parallel if stage >= first else size for first, size in sizes_by_first_sharded_stage
    )


def layer_activation_bytes(
    *,
    seq_len: int,
    batch: int,
    hidden: int,
    num_heads: int,
    num_tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: LayerRecompute = "none",
) -> float:
    """Return the bytes per device that one transformer layer saves for its backward pass, for one micro-batch.

    Args:
        seq_len: tokens per sequence (s).
        batch: sequences per micro-batch and replica (b).
        hidden: width of the residual stream (h); the feed-forward layer is four times as wide.
        num_heads: number of attention heads (a).
        num_tensor_parallel: number of devices that share each layer (t).
        sequence_parallel: whether they also share the tokens between tensor-parallel products.
        recompute: what the backward pass recomputes; with "full" each device saves the whole input of the layer.

    Raises:
        CostModelError: a count that is no whole number of at least 1, an unknown `recompute`.
    """
    counts = {"seq_len": seq_len, "batch": batch, "hidden": hidden, "num_heads": num_heads}
    for what, value in {**counts, "num_tensor_parallel": num_tensor_parallel}.items():
        require_count(what, value, advice="give the sizes of one layer on one device")
    if recompute not in get_args(LayerRecompute):
        known = ", ".join(get_args(LayerRecompute))
        raise CostModelError(f"recompute is {recompute!r}, but only {known} exist: choose one of them.")
    tokens = float(seq_len * batch * hidden)
    if recompute == "full":
        return 2 * tokens
    # 10 of the 34 bytes belong to values outside the products (norms, dropout), which tensor parallelism does not
    # split.
    shared = num_tensor_parallel if sequence_parallel else 1
    core = 0.0 if recompute == "selective" else 5 * num_heads * seq_len / hidden
    return tokens * (10 / shared + (24 + core) / num_tensor_parallel)


def microbatches_in_flight(
    schedule: PipelineSchedule, *, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> float:
    """Return the peak number of micro-batches in flight on a stage, in units of all the layers on its devices.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        stage: index of the stage; for "interleaved" the index of the group of devices.
        num_stages: number of stages, or of groups of devices.
        num_microbatches: number of micro-batches per step.
        num_chunks: number of model chunks on each group of devices; only "interleaved" has more than one.

    Raises:
        CostModelError: no such stage or schedule, a count that is no whole number of at least 1.
    """
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for what, value in counts.items():
        require_count(what, value, advice="describe the pipeline")
    if stage not in range(num_stages):
        raise CostModelError(f"The stage is {stage!r}, but a number from 0 to {num_stages - 1} is needed.")
    if schedule not in get_args(PipelineSchedule):
        known = ", ".join(get_args(PipelineSchedule))
        raise CostModelError(f"The schedule is {schedule!r}, but only {known} exist: choose one of them.")
    if schedule == "gpipe":
        return float(num_microbatches)
    # Interleaving a single chunk is the same order as 1F1B.
    if schedule == "1f1b" or num_chunks == 1:
        return float(min(num_stages - stage, num_microbatches))
    warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
    # The warm-up passes, and the forward pass that precedes the first backward pass, each of one chunk.
    return min(warmup + 1, num_chunks * num_microbatches) / num_chunks
