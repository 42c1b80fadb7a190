"""Planners by their names on the command line, with options as text: NUMBER, true, false or none, a word, NAME:NUMBER;…

Options may also follow the name, `hybrid:pipeline=2:tensor=4`, so that one word says all of a planner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Literal, get_args, get_origin, get_type_hints

from alpa_lite.errors import PlanError
from alpa_lite.planners.auto import Auto
from alpa_lite.planners.axonn import AxoNN
from alpa_lite.planners.coloc_rl import ColocRL
from alpa_lite.planners.compiled import Compiled
from alpa_lite.planners.convolution_parallel import ConvolutionParallel, OneWeirdTrick
from alpa_lite.planners.data_parallel import FSDP, DataParallel, GShard, Zero
from alpa_lite.planners.flexflow import FlexFlow
from alpa_lite.planners.grid_search import GridSearch
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.jitted import Jitted
from alpa_lite.planners.karma import Karma
from alpa_lite.planners.megatron import DeepSpeed3D, Megatron
from alpa_lite.planners.mesh_tensorflow import MeshTensorFlow
from alpa_lite.planners.on_mesh import OnMesh
from alpa_lite.planners.parameter_server import ParameterServer
from alpa_lite.planners.pipedream import PipeDream, PipeDream2BW
from alpa_lite.planners.pipeline import Pipeline, TorchGPipe
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.trainer_configuration import READERS, TrainerConfiguration, settings_of
from alpa_lite.text import did_you_mean

PLANNERS: Mapping[str, type[Planner]] = {
    "auto": Auto,
    "data_parallel": DataParallel,
    "megatron": Megatron,
    "zero": Zero,
    "fsdp": FSDP,
    "pipeline": Pipeline,
    "torchgpipe": TorchGPipe,
    "pipedream": PipeDream,
    "pipedream_2bw": PipeDream2BW,
    "parameter_server": ParameterServer,
    "coloc_rl": ColocRL,
    "flexflow": FlexFlow,
    "hybrid": Hybrid,
    "deepspeed_3d": DeepSpeed3D,
    "grid_search": GridSearch,
    "karma": Karma,
    "gshard": GShard,
    "mesh_tensorflow": MeshTensorFlow,
    "axonn": AxoNN,
    "one_weird_trick": OneWeirdTrick,
    "convolution_parallel": ConvolutionParallel,
    "on_mesh": OnMesh,
    "jitted": Jitted,
    "compiled": Compiled,
}
"""Planners by their name on the command line. `Custom` takes objects of JAX, and has none; `TrainerConfiguration` has
the name of a trainer, a colon and its settings."""


def _of_trainer(trainer: str, text: str) -> Planner:
    found = TrainerConfiguration(trainer=trainer, settings=text)
    # Whatever is wrong is said before anything is planned.
    settings_of(trainer, found.settings)
    return found


FROM_TEXT: Mapping[str, Callable[[str], Planner]] = {
    **{trainer: partial(_of_trainer, trainer) for trainer in READERS},
    "compiled": lambda text: Compiled(program=text),
}
"""Planners of what another program has written, a text or the path of a file: `NAME:TEXT` on the command line."""


_OPTION = re.compile(r"\w+=")
_NEXT_OPTION = re.compile(r":(?=\w+=)")  # values have colons of their own: `axes=a:2;b:4`
_NUMBER = re.compile(r"\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
_WORDS: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number of at least 0",
    float: "a number of at least 0",
    str: "a word",
    Mapping[str, int]: "NAME:NUMBER;NAME:NUMBER",
    type(None): "the word none",
}


def options_of(planner: type[Planner]) -> frozenset[str]:
    """Return the names of a planner's options."""
    return frozenset(field.name for field in fields(planner))  # type: ignore[arg-type]  # all are dataclasses


def is_settings(name: str, text: str) -> bool:
    """Return whether what follows a name was written by another program (`FROM_TEXT`), and is no list of options.

    A name may be both: `megatron:tensor=4` and `megatron:--tensor-model-parallel-size 4`.
    """
    return name not in PLANNERS or (name in FROM_TEXT and _OPTION.match(text) is None)


def planner_of_name(name: str) -> type[Planner]:
    """Return the class of a planner by name. Raises `PlanError`, with a close name, if there is none."""
    # Words on a command line are mostly joined by dashes.
    planner = PLANNERS.get(name.replace("-", "_"))
    if planner is None:
        raise PlanError(
            f"There is no planner {name!r}.{did_you_mean(name, PLANNERS)} Choose one of {', '.join(PLANNERS)}, "
            "or give a saved plan."
        )
    return planner


def planner_by_name(name: str, options: Sequence[str]) -> Planner:
    """Return a planner by name with `name=value` options, or the planner of a text as `NAME:TEXT` (`FROM_TEXT`).

    Raises `PlanError` for unknown names and options.
    """
    name, has_more, settings = name.partition(":")
    if has_more and not is_settings(name.replace("-", "_"), settings):
        options = [*_NEXT_OPTION.split(settings), *options]
    elif has_more:
        if name not in FROM_TEXT:
            raise PlanError(
                f"There is no reader for settings of {name!r}.{did_you_mean(name, FROM_TEXT)} "
                f"Choose one of {', '.join(FROM_TEXT)}."
            )
        if options:
            raise PlanError(f"Settings of {name} take no options: they say all that they decide. Leave out --option.")
        return FROM_TEXT[name](settings)
    planner = planner_of_name(name)
    hints, known = get_type_hints(planner), options_of(planner)
    values: dict[str, object] = {}
    for option in options:
        key, _, text = option.partition("=")
        key = planner.old_options.get(key, key)
        fitting = [value for value in _readings(text) if key in known and _fits(value, hints[key])]
        if not fitting and key in known:
            raise PlanError(f"{option!r} was given to {name!r}, but {key} {_wanted(hints[key])}.")
        if not fitting:
            listed = ", ".join(sorted(known)) or "none"
            close = did_you_mean(key, known)
            raise PlanError(f"{name!r} has no option {key!r}.{close} Its options are {listed}. Write NAME=VALUE.")
        values[key] = fitting[0]
    try:
        return planner(**values)
    # The constructor of a dataclass names the options that are missing.
    except TypeError as error:
        raise PlanError(
            f"The planner {name!r} needs more options: {error}. Give them as --option NAME=VALUE."
        ) from error


def _readings(text: str) -> list[object]:
    """Return the values that a text may stand for, most specific first; the type of the option decides."""
    pairs = [pair.partition(":") for pair in text.split(";")]
    # A text such as `1` may be an integer, a float, a truth value or a word, and `none` a word or no value.
    found: list[object] = [None] if text == "none" else []
    found += [int(text)] if text.isdecimal() else []
    found += [float(text)] if _NUMBER.fullmatch(text) else []
    found += [text in ("true", "1")] if text in ("true", "false", "1", "0") else []
    if all(name and size.isdecimal() for name, _, size in pairs):
        found.append({name: int(size) for name, _, size in pairs})
    return [*found, text] if text else found


def _wanted(hint: object) -> str:
    """Return a clause that says which values an option takes."""
    # The arguments of a `Literal` are values; those of a union are types.
    kinds = [hint] if get_origin(hint) is Literal else [hint, *get_args(hint)]
    words = [word for kind, word in _WORDS.items() if kind in kinds]
    words += [f"one of {', '.join(map(str, get_args(kind)))}" for kind in kinds if get_origin(kind) is Literal]
    # That it may be left out is no value to ask for.
    can_be_given = {*words} - {_WORDS[type(None)]}
    return f"takes {' or '.join(words)}" if can_be_given else "cannot be given on the command line"


def _fits(value: object, hint: object) -> bool:
    """Return True if a value has the type of an option."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(value, dict):
        # Subscripted types are compared: `isinstance` refuses them.
        return Mapping[str, int] in (hint, *get_args(hint))
    # Not `isinstance`: True is an int too, but no number for an option.
    return type(value) in (hint, *get_args(hint))
