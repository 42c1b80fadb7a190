"""The manual plan and the backend of a published run, from its description alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd, lcm

from alpa_lite.cli.models.transformer import Recompute
from alpa_lite.schedule import Interleaved1F1B, OneFOneB, Schedule
from benchmarks.published.cluster_of import device_name
from benchmarks.published.row import Row
from cost_models.hardware import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The sharding of state over data-parallel devices: a ZeRO stage, and how many groups hold whole copies."""

    stage: int
    replicas: int = 1


def sharding_of(row: Row) -> Sharding:
    """Return the ZeRO stage from the words of the table; FSDP is stage 3, a distributed optimizer stage 1."""
    text = row.sharding.lower()
    if "fsdp" in text or "zero-3" in text or "full_shard" in text:
        degree = re.search(r"fsdp(?:2\b)?+\s*(\d+)", text)  # a 2 that stands alone is the version
        size = int(degree[1]) if degree else row.data
        # Systems cut flat buffers into any number of parts; a plan cuts dims, into as many as divide the width.
        size = gcd(size, row.hidden, row.data) if row.hidden else gcd(size, row.data)
        return Sharding(stage=3, replicas=row.data // size)
    if "shard-largest" in text:
        # Every array of state lies in parts on all devices, whatever computes with it.
        return Sharding(stage=3)
    if "zero-2" in text or "zero-1" in text or "distributed optimizer" in text:
        return Sharding(stage=1)
    return Sharding(stage=0)


def scatters_sums(row: Row) -> bool:
    """Whether sums over tensor devices stay scattered between products: as stated, and always with XLA for TPUs."""
    return row.sequence_parallel or device_name(row.hardware).startswith("tpu")


def expert_devices(row: Row) -> int:
    """Return the number of data-parallel devices that may hold different experts; a searched sharding may use all.

    Experts on more devices than there are replicas are folded over the tensor devices too (Megatron-Core): the
    replicas hold different experts, and the tensor axis splits what each of them holds.
    """
    searched = "ilp" in row.sharding.lower() or not row.sharding
    if row.experts is not None and row.expert == 1 and searched:
        return row.data
    return gcd(row.expert, row.data)


#: Accelerators from before the generation for which libraries had fused attention from the start.
_OLDER_DEVICES = ("v100", "a100", "a10", "a40", "t4", "tpu-v2", "tpu-v3", "rtx-3090")


def is_recent(row: Row) -> bool:
    """Whether the run's software dates from about 2023 on.

    By then bfloat16 had replaced float16, frameworks reduced gradients during the backward pass, and Megatron's tensor
    devices shared the positions between products, which made it needless to recompute whole layers (Korthikanti et al.
    2022): its runs on the devices of that time that do the one and not the other are older, in whatever precision.
    """
    megatron = row.model > 1 and issues_kernels(row) and not is_torch(row)
    whole_layers = not scatters_sums(row) and row.recompute.lower().startswith("full")
    if megatron and whole_layers and device_name(row.hardware).startswith(_OLDER_DEVICES):
        return False
    return not row.precision.startswith(("fp16", "fp32", "tf32"))


def fuses_attention(row: Row) -> bool:
    """Whether attention runs as one kernel.

    Fused attention was added to PyTorch with version 2.0 (2023, as was FSDP in its present form), to others with
    Transformer Engine ("-te") and with the libraries for Hopper GPUs and for TPUs of the time.
    """
    if not is_recent(row):
        return False
    older = device_name(row.hardware).startswith(_OLDER_DEVICES)
    return not older or row.precision.endswith("-te") or is_torch(row)


def is_torch(row: Row) -> bool:
    """Whether the run used PyTorch's own FSDP; its attention kernels were FlashAttention-2, written for the A100."""
    return re.search(r"full_shard|fsdp2\b", row.sharding.lower()) is not None  # FSDP256 is a degree


def runs_eagerly(row: Row) -> bool:
    """Whether one library call runs after another: PyTorch's own FSDP, unless the notes say that it was compiled.

    Megatron and its relatives bring kernels of their own for norms, softmax, biases and activations.
    """
    notes = row.notes.lower()
    return is_torch(row) and ("torch.compile" not in notes or "no torch.compile" in notes)


#: Words of notes that name a compiler, or what is built on one.
_COMPILERS = ("xla", "jax", "alpa", "logical mesh", "maxtext", "tensorflow", "torch.compile")
#: Host seconds per kernel of PyTorch programs, as read off runs of small models whose step time does not depend on how
#: many devices share a layer (57 us per kernel of Megatron's, VIA-Research/vTrain, hidden size 1024 on 8 A100); a
#: library call is less than such a kernel.
CALL_SECONDS = {"all": 5.7e-5, "calls": 1e-5}


def issues_kernels(row: Row) -> bool:
    """Whether the host issues each kernel by itself: no compiler is named, nor do the devices need one."""
    notes = row.notes.lower().replace("no torch.compile", "")
    return not device_name(row.hardware).startswith("tpu") and not any(word in notes for word in _COMPILERS)


def call_seconds(row: Row) -> float:
    """Return the host seconds per kernel; 0 where the description names a compiler, or the devices need one."""
    if not issues_kernels(row):
        return 0.0
    return CALL_SECONDS["calls" if runs_eagerly(row) else "all"]


#: Mean tokens of Wikipedia's sequences where 512 fit: half of them (Krell et al. 2021, arXiv 2107.02027, which counts
#: 50 % of padding), and half a bin of 64 that a batch of sequences of like length is padded by.
_READ_TOKENS = 288


def computed_length(row: Row) -> int:
    """Return the mean tokens per sequence that a run computes.

    Masked models read sequences of any length up to the stated one. Compilers, and frameworks that cut layers among
    devices, pad them to one shape; others sort them by length and compute little padding.
    """
    one_shape = not call_seconds(row) or row.model * row.pipeline > 1 or sharding_of(row).stage > 0
    return row.seq_len if row.family != "bert" or one_shape else min(row.seq_len, _READ_TOKENS)


def backend_of(row: Row) -> Backend:
    """Return what the run's software overlaps and fuses."""
    recent, tpu = is_recent(row), device_name(row.hardware).startswith("tpu")
    return Backend(
        fused_attention=fuses_attention(row),
        ported_attention=is_torch(row),
        fusion="calls" if runs_eagerly(row) else "all",
        # Collectives took turns with kernels before: XLA's on GPUs were synchronous, and so were Megatron's but for
        # those that came with sequence parallelism (Korthikanti et al. 2022).
        overlap=recent or row.sequence_parallel or tpu,
        # Frameworks reduce buckets of gradients during the backward pass; XLA on GPUs does so within loops alone.
        overlap_gradients=recent and (tpu or call_seconds(row) > 0),
        # Products that take parts of what is gathered came with Transformer Engine for Hopper; XLA has them on TPUs.
        overlap_products=fuses_attention(row) and scatters_sums(row),
        # PyTorch's FSDP makes one array of the parameters of each block (Zhao et al. 2023, arXiv 2304.11277, 3.2).
        flat_parameters=is_torch(row),
        call_seconds=call_seconds(row),
    )


def periods_of(row: Row) -> int:
    """Return the number of periods of layers: until one with experts, or one that attends to all positions, repeats."""
    every = row.experts.every if row.experts is not None else 1
    return row.layers // lcm(every, window_of(row).global_every or 1)


def has_expert_axis(row: Row) -> bool:
    """Whether experts lie on the expert devices of the plan, also where another layout were cheaper.

    A search was free to choose. With context devices, experts are folded over these first (Megatron-Core), which an
    axis of its own cannot do: it would cross more hosts, and the layout is left to its price.
    """
    return row.expert > 1 and row.context == 1 and expert_devices(row) > 1


@dataclass(frozen=True, slots=True)
class Window:
    """The positions that a local layer attends to, and every how many layers one attends to all (0: never)."""

    size: int | None = None
    global_every: int = 0


def window_of(row: Row) -> Window:
    """Return the sliding window from notes like "5:1 sliding window 1024": five local layers, then one that is not."""
    found = re.search(r"(?:(\d+):1 )?sliding[- ]window (?:of |attention )?(\d+)", row.notes.lower())
    if not found or int(found[2]) >= row.seq_len:
        return Window()
    return Window(int(found[2]), int(found[1]) + 1 if found[1] else 0)


def chunks_of(row: Row) -> int:
    """Return the chunks of the model per device of a pipeline, as stated, at most one per period of layers.

    If nothing is stated, the number up to eight that divides the layers most equally: recipes interleave as finely.
    """
    per_stage = periods_of(row) // row.pipeline
    if row.pipeline == 1 or per_stage < 2:
        return 1
    if row.interleave is not None:
        return min(row.interleave, per_stage)
    return max(count for count in range(1, min(per_stage, 8) + 1) if per_stage % count == 0)


def schedule_of(row: Row) -> Schedule:
    """Return 1F1B, interleaved if the run has several chunks of the model per device."""
    chunks = chunks_of(row)
    if chunks > 1 and (row.num_microbatches or 1) % row.pipeline == 0:
        return Interleaved1F1B(num_chunks=chunks)
    return OneFOneB()


def devices_of_stages(row: Row) -> tuple[int, ...]:
    """Return the devices of each stage as stated, () if all have equally many; the remainder goes to the first."""
    if row.stage_devices or row.num_devices % row.pipeline == 0:
        return row.stage_devices
    each, left = divmod(row.num_devices, row.pipeline)
    return tuple(each + (stage < left) for stage in range(row.pipeline))


def loops_of(row: Row) -> int:
    """Return the number of loops in which the layers are written: one per stage, or one if stages differ.

    Stages of convolutional models differ, and so do those that cut between a layer of experts and its neighbour.
    """
    count = row.pipeline * schedule_of(row).stages_per_processor
    if row.blocks and row.family != "wresnet" and periods_of(row) % sum(row.blocks) == 0:
        return sum(row.blocks)
    return 1 if row.family == "wresnet" or count > periods_of(row) else count


def recompute_of(row: Row) -> Recompute:
    """Return the recomputation of the backward pass, as a `alpa_lite.cli.models.transformer.Recompute`.

    Fused attention computes its scores again in any case.
    """
    text = row.recompute.lower()
    # `jax.checkpoint` ("remat") saves nothing unless a policy is given.
    if text.startswith(("full", "remat")):
        return "full"
    if "save_dot_with_no_batch_dim" in text:
        return "dots_without_batch"
    if "save_dot" in text:
        return "dots"
    if "per-op" in text:
        return "alternate"
    if text.startswith("custom"):
        return "projections"
    if text.startswith("selective") or fuses_attention(row):
        return "selective"
    return "none"
