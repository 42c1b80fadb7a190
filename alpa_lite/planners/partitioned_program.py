"""Arguments and results of a program that XLA partitions, read from its text.

    compiled.as_text()                  HLO of one device: shapes of blocks, `sharding=` of parameters
    lowered.as_text(dialect="hlo")      HLO before it is partitioned: shapes of whole arrays
    lowered.as_text()                   StableHLO: `sdy.sharding` or `mhlo.sharding` of arguments and results

where `lowered = jax.jit(step, in_shardings=…).lower(*args)` and `compiled = lowered.compile()`. Compiled text has the
shapes of the results of one device, and of larger programs alone their shardings too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.errors import PlanError
from alpa_lite.sharding.tile_assignments import Tiling, hlo_tiling, shardy_mesh, shardy_tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramArray:
    """An argument or result of a program.

    Attributes:
        name: path such as `params/w`, as the text names it; "" where it does not.
        dtype: dtype in the names of NumPy; "" for others.
        shape: shape in the program.
        tiling: how it is divided among the devices; None if the text does not say.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tiling: Tiling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedProgram:
    """The arguments and results of a program for several devices.

    Attributes:
        num_devices: number of devices that it is partitioned for.
        arguments, results: its arrays in order, without the arguments that it does not read.
        is_of_device: whether shapes are those of the blocks of one device.
        mesh: pairs of an axis and its devices, if the text names a mesh.
    """

    num_devices: int
    arguments: tuple[ProgramArray, ...]
    results: tuple[ProgramArray, ...]
    is_of_device: bool
    mesh: tuple[tuple[str, int], ...] = ()


def read_program(text: str) -> PartitionedProgram:
    """Read a program from its text.

    Raises:
        PlanError: the text is neither HLO nor StableHLO, or has a sharding that is no division into equal blocks.
    """
    if "HloModule" in text:
        return _read_hlo(text)
    if "func.func" in text:
        return _read_stablehlo(text)
    raise PlanError(
        f"The text {text.strip()[:60]!r} is no program that can be read: give that of compiled.as_text() or "
        "lowered.as_text() of jax.jit(step).lower(*args), or a file with it."
    )


_PARAMETER = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?)\bparameter\((\d+)\)(.*)$", re.MULTILINE)
_ROOT = re.compile(r"^\s*ROOT %?[\w.\-]+ = (.*)$", re.MULTILINE)
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+).*?^}", re.MULTILINE | re.DOTALL)
_TYPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


def _read_hlo(text: str) -> PartitionedProgram:
    entry = _ENTRY.search(text)
    if entry is None:
        raise PlanError("The HLO has no ENTRY computation. Give the whole text, as compiled.as_text() returns it.")
    header, body = text[text.index("HloModule") :].partition("\n")[0], entry[0]
    found = sorted(_PARAMETER.finditer(body), key=lambda match: int(match[2]))
    root = _ROOT.search(body)
    if root is None or [int(match[2]) for match in found] != [*range(len(found))]:
        raise PlanError("The ENTRY computation of the HLO is not whole. Give the text of compiled.as_text().")
    devices = _num_partitions(header, r"\bnum_partitions=(\d+)", text)
    arguments = [a for match in found for a in _hlo_arrays(match[1], match[3], devices)]
    kind = _type_text(root[1])
    results = _hlo_arrays(kind, root[1].removeprefix(kind), devices)
    # Passes after partitioning schedule the program; a dump from before them has the mark in its name.
    is_of_device = "is_scheduled=true" in header or entry[1].endswith("_spmd")
    meshes = re.search(r"xla\.sdy\.meshes=\{\w+ = (#sdy\.mesh<\[[^\]]*\][^>]*>)\}", header)
    return PartitionedProgram(
        num_devices=devices,
        arguments=tuple(arguments),
        results=tuple(results),
        is_of_device=is_of_device,
        mesh=tuple(shardy_mesh(meshes[1]).items()) if meshes else (),
    )


def _num_partitions(header: str, pattern: str, text: str) -> int:
    """Return the number of devices that a program is partitioned for. Raises `PlanError` if the text does not say."""
    said = re.search(pattern, header)
    if said is not None:
        return int(said[1])
    # Text from before partitioning has the number in its shardings alone.
    tiles = re.search(r"devices=\[[\d,]+\]<=\[([\d,]+)\]", text)
    if tiles is None:
        raise PlanError(
            "The program has no num_partitions and no shardings: it is for one device. Compile what jax.jit(step, "
            "in_shardings=…) lowers, for the devices of a mesh."
        )
    count = 1
    for size in tiles[1].split(","):
        count *= int(size)
    return count


def _type_text(instruction: str) -> str:
    """Return the type with which an instruction of HLO begins."""
    if not instruction.startswith("("):
        return instruction.partition(" ")[0]
    return instruction[: _end(instruction, 0)]


def _hlo_arrays(kind: str, rest: str, devices: int) -> list[ProgramArray]:
    """Return the arrays of a type of HLO, which may be a tuple, with the attributes that follow the instruction."""
    types = [match.groups() for match in _TYPE.finditer(re.sub(r"/\*.*?\*/", "", kind))]
    start = re.search(r"\bsharding=(?=\{)", rest)
    tilings: Sequence[Tiling | None] = [None] * len(types)
    if start is not None:
        text = rest[start.end() : _end(rest, start.end())]
        # A tuple has one sharding for each of its arrays, or one for all of them.
        each = list(_parts(text[1:-1])) if text.startswith("{{") else [text] * len(types)
        if len(each) != len(types):
            raise PlanError(f"The sharding {text[:60]} of the HLO is for {len(each)} arrays instead of {len(types)}.")
        tilings = [hlo_tiling(one.strip(), devices) for one in each]
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', rest)
    return [
        ProgramArray(
            name=_path(name[1]) if name and len(types) == 1 else "",
            dtype=_dtype(element),
            shape=tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size),
            tiling=tiling,
        )
        for (element, sizes), tiling in zip(types, tilings, strict=True)
        if element != "token"
    ]


_LOCATED = re.compile(r'\bloc\("((?:[^"\\]|\\.)*)"')


def _read_stablehlo(text: str) -> PartitionedProgram:
    main = re.search(r"func\.func (?:public )?@main(?=\()", text)
    if main is None:
        raise PlanError("The StableHLO has no function @main. Give the whole text, as lowered.as_text() returns it.")
    meshes = {name: shardy_mesh(mesh) for name, mesh in re.findall(r"sdy\.mesh @\"?([\w.\-]+)\"? = (<.*?\]>?)", text)}
    end = _end(text, main.end())
    # One name for the mesh of the program, as JAX writes it; with several the axes are found anew.
    named = next(iter(meshes.values())) if len(meshes) == 1 else {}
    devices = 1
    for size in named.values():
        devices *= size
    devices = devices if named else _num_partitions(text, r"mhlo\.num_partitions = (\d+)", text)
    after = re.compile(r"\s*->\s*(?=\()").match(text, end)
    results = text[after.end() + 1 : _end(text, after.end()) - 1] if after else ""
    return PartitionedProgram(
        num_devices=devices,
        arguments=tuple(_tensor(part, meshes, devices) for part in _parts(text[main.end() + 1 : end - 1])),
        results=tuple(_tensor(part, meshes, devices) for part in _parts(results)),
        is_of_device=False,
        mesh=tuple(named.items()),
    )


def _tensor(text: str, meshes: Mapping[str, Mapping[str, int]], devices: int) -> ProgramArray:
    """Return an argument or result of a function of StableHLO."""
    kind = re.search(r"tensor<((?:\d+x)*)([^?>]+)", text)
    if kind is None:
        raise PlanError(f"The array {text[:60]!r} of the StableHLO has no static shape, which a plan needs.")
    name, tiling = _LOCATED.search(text), None
    if (start := text.find("#sdy.sharding<")) >= 0:
        tiling = shardy_tiling(text[start : _end(text, text.index("<", start))], meshes)
    elif (old := re.search(r'mhlo\.sharding = "([^"]*)"', text)) is not None:
        tiling = hlo_tiling(old[1], devices)
    return ProgramArray(
        name=_path(name[1]) if name else "",
        dtype=_dtype(kind[2]),
        shape=tuple(map(int, re.findall(r"\d+", kind[1]))),
        tiling=tiling,
    )


_OPEN, _CLOSE = "([{<", ")]}>"


def _end(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth, place = 0, start
    for place, sign in _signs(text, start):
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if depth == 0:
            return place + 1
    raise PlanError("The program is not whole: a bracket is not closed. Give the text as JAX returns it.")


def _parts(text: str) -> Iterator[str]:
    """Yield the parts of a text between the commas that are outside of brackets."""
    depth, begin = 0, 0
    for place, sign in _signs(text, 0):
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if sign == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:]


_SIGN = re.compile(r'"(?:[^"\\]|\\.)*"|->|<=|[()\[\]{}<>,]')


def _signs(text: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield the brackets and commas of a text with their places, outside of strings."""
    for match in _SIGN.finditer(text, start):
        # An arrow and the sign of an iota have no bracket to match.
        if len(match[0]) == 1:
            yield match.start(), match[0]


_KEY = re.compile(r"\['(.*?)'\]|\[\"(.*?)\"\]|\[<flat index (\d+)>\]|\[(.*?)\]|\.(\w+)|^(\w+)")


def _path(name: str) -> str:
    r"""Return the path of an argument, such as `params/layers/0/w` for `params[\'layers\'][0].w`."""
    keys = (next(filter(None, found.groups()), "") for found in _KEY.finditer(name.replace("\\", "")))
    return "/".join(keys)


def _dtype(element: str) -> str:
    """Return the name of NumPy of a type of HLO (`s32`, `pred`) or MLIR (`i32`, `i1`); "" for other types."""
    if element in ("pred", "i1"):
        return "bool"
    kind = re.fullmatch(r"(bf|f|si|s|i|ui|u|c)(\d+)", element)
    if kind is None:
        return {"complex<f32": "complex64", "complex<f64": "complex128"}.get(element, "")
    words = {"bf": "bfloat", "f": "float", "c": "complex", "u": "uint", "ui": "uint"}
    return f"{words.get(kind[1], 'int')}{kind[2]}"
