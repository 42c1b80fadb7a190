"""Language models by name, with the sizes that were published, and their train steps as shapes to plan.

    llama      Llama 2 (7b, 13b; Touvron et al. 2023, table 1 and the released configurations) and 3 (8b, 70b, 405b;
               Grattafiori et al. 2024, table 3)
    gpt        Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", table 1, and
               the 175b of Brown et al. 2020, table 2.1; a vocabulary of 51 200
    mixtral    Jiang et al. 2024, "Mixtral of experts", table 1, and the released configuration of 8x22b

Sizes are options: `llama-70b:num_layers=40`, and a family alone is the smallest of its models. Training is in bfloat16
by Adam on float32 copies of the weights; attention computes its scores again in the backward pass, as kernels do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.model_parts import Tree
from alpa_lite.cli.models.train import Adam, TrainStep, init_state, make_train_step
from alpa_lite.cli.models.transformer import Architecture, Computation, Transformer
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.errors import PlanError
from alpa_lite.text import did_you_mean

_COMPUTATION = Computation(recompute="selective", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a language model of a family, which are its options by name.

    Attributes:
        inner: width of the feed-forward layers, or of one expert.
        num_kv_heads: heads of keys and values.
        num_experts: experts of each layer, of which a token visits two; 0: none.
        seq_len: tokens of a sequence that the model was trained with.
    """

    num_layers: int
    hidden: int
    num_heads: int
    inner: int
    vocab_size: int
    seq_len: int
    num_kv_heads: int
    num_experts: int = 0


def _gpt(num_layers: int, hidden: int, num_heads: int) -> ModelSizes:
    return ModelSizes(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        inner=4 * hidden,
        vocab_size=51200,
        seq_len=2048,
        num_kv_heads=num_heads,
    )


def _llama_3(num_layers: int, hidden: int, num_heads: int, inner: int) -> ModelSizes:
    return ModelSizes(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        inner=inner,
        vocab_size=128256,
        seq_len=8192,
        num_kv_heads=8,
    )


_llama_2 = partial(ModelSizes, vocab_size=32000, seq_len=4096)
_mixtral = partial(ModelSizes, num_kv_heads=8, num_experts=8, seq_len=8192)

MODELS: Mapping[str, ModelSizes] = {
    "llama-7b": _llama_2(num_layers=32, hidden=4096, num_heads=32, inner=11008, num_kv_heads=32),
    "llama-13b": _llama_2(num_layers=40, hidden=5120, num_heads=40, inner=13824, num_kv_heads=40),
    "llama-8b": _llama_3(32, 4096, 32, 14336),
    "llama-70b": _llama_3(80, 8192, 64, 28672),
    "llama-405b": _llama_3(126, 16384, 128, 53248),
    "gpt-1.7b": _gpt(24, 2304, 24),
    "gpt-3.6b": _gpt(30, 3072, 32),
    "gpt-7.5b": _gpt(36, 4096, 32),
    "gpt-18b": _gpt(40, 6144, 48),
    "gpt-39b": _gpt(48, 8192, 64),
    "gpt-76b": _gpt(60, 10240, 80),
    "gpt-145b": _gpt(80, 12288, 96),
    "gpt-175b": _gpt(96, 12288, 96),
    "gpt-310b": _gpt(96, 16384, 128),
    "gpt-530b": _gpt(105, 20480, 128),
    "gpt-1t": _gpt(128, 25600, 160),
    "mixtral-8x7b": _mixtral(num_layers=32, hidden=4096, num_heads=32, inner=14336, vocab_size=32000),
    "mixtral-8x22b": _mixtral(num_layers=56, hidden=6144, num_heads=48, inner=16384, vocab_size=32768),
}
"""The sizes of each model; the part of a name before its dash is its family."""

_FAMILIES: Mapping[str, Architecture] = {
    "llama": Architecture(
        num_kv_heads=8, activation="silu", gated=True, norm="rms", positions="rotary", bias=False, tied=False
    ),
    "gpt": Architecture(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model by name with its sizes; `sequence` is the length of its sequences."""

    name: str
    family: str
    sizes: ModelSizes

    def transformer(self, seq_len: int | None = None) -> Transformer:
        """Return the model for sequences of a length, by default that of its training."""
        sizes = self.sizes
        # Mixtral's layers are those of Llama, with experts.
        kind = _FAMILIES["gpt" if self.family == "gpt" else "llama"]
        experts = Experts(num_experts=sizes.num_experts, top_k=2) if sizes.num_experts else None
        return Transformer(
            vocab_size=sizes.vocab_size,
            num_layers=sizes.num_layers,
            hidden=sizes.hidden,
            num_heads=sizes.num_heads,
            inner=sizes.inner,
            seq_len=seq_len or sizes.seq_len,
            architecture=replace(kind, num_kv_heads=sizes.num_kv_heads),
            experts=experts,
            computation=_COMPUTATION,
        )

    def training(self, batch_size: int, seq_len: int | None = None) -> tuple[TrainStep, tuple[Tree, ...]]:
        """Return a train step with its arguments as shapes; nothing is allocated."""
        model, optimizer = self.transformer(seq_len), Adam(weight_decay=0.1, master_weights=True)
        state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
        return make_train_step(model.loss_fn, optimizer), (state, model.batch_shapes(batch_size))


def model_named(text: str) -> NamedModel:
    """Return the model of a name with its options, `NAME:OPTION=NUMBER:…`.

    Raises:
        PlanError: there is no such model or option, a value is no positive number, or sizes do not fit together.
    """
    name, *options = text.split(":")
    name = name.lower()
    full = name if name in MODELS else next((known for known in MODELS if known.split("-")[0] == name), None)
    if full is None:
        raise PlanError(
            f"There is no model {name!r}.{did_you_mean(name, MODELS)} Choose one of {', '.join(MODELS)}, with sizes as "
            "options: llama-8b:num_layers=16. A step of your own: alpa_lite.advise."
        )
    changes = dict[str, int]()
    known = ModelSizes.__dataclass_fields__
    for option in options:
        key, _, value = option.partition("=")
        if key not in known:
            raise PlanError(
                f"The model {full!r} has no option {key!r}.{did_you_mean(key, known)} Its options are "
                f"{', '.join(known)}. Write {full}:NAME=NUMBER."
            )
        if not value.isdecimal() or (int(value) < 1 and key != "num_experts"):
            raise PlanError(
                f"{option!r} was given to the model {full!r}, but {key} takes a whole number of at least 1."
            )
        changes[key] = int(value)
    if "num_heads" in changes and "num_kv_heads" not in changes:
        # Models without groups of queries keep to that, whatever their number of heads.
        sizes = MODELS[full]
        changes["num_kv_heads"] = (
            changes["num_heads"]
            if sizes.num_kv_heads == sizes.num_heads
            else min(sizes.num_kv_heads, changes["num_heads"])
        )
    found = NamedModel(name=text, family=full.split("-")[0], sizes=replace(MODELS[full], **changes))
    try:
        found.transformer()
    except ValueError as error:
        raise PlanError(f"The sizes of {text!r} do not fit together: {error}") from error
    return found
