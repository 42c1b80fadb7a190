"""What is read from the texts of programs, form by form."""

from __future__ import annotations

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.planners.partitioned_program import read_program

HLO = r"""HloModule jit_f, is_scheduled=true, entry_computation_layout={(s32[4])->(s32[4])}, num_partitions=4

%helper (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0), sharding={manual}
}

ENTRY %main.1_spmd (param: s32[4], param.1: f32[8]) -> (s32[4], pred[2,3]) {
  %p = bf16[8]{0:T(8)} parameter(1), sharding={replicated}, metadata={op_name="o[0][\'a.b\'].mu[<flat index 2>]"}
  %param = s32[4]{0:T(128)} parameter(0), sharding={devices=[4]<=[4]}, metadata={op_name="x" source_file="f.py"}
  ROOT %tuple = (s32[4], /*index=1*/pred[2,3]{1,0}) tuple(%param, %o), sharding={{devices=[4]<=[4]}, {replicated}}
}
"""

STABLEHLO = """module @jit_f attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(
    %arg0: tensor<8x4xui32> {mhlo.sharding = "{devices=[2,2]<=[4]}"} loc("a['b']"), %arg1: tensor<complex<f32>>
  ) -> (tensor<i1> {jax.result_info = "result, (1)"}) {
"""


def test_compiled_hlo() -> None:
    program = read_program(HLO)
    assert (program.num_devices, program.is_of_device, program.mesh) == (4, True, ())
    x, state = program.arguments
    assert (x.name, x.dtype, x.shape) == ("x", "int32", (4,)) and x.tiling is not None and x.tiling.ways == (4,)
    assert (state.name, state.dtype, state.shape) == ("o/0/a.b/mu/2", "bfloat16", (8,))
    assert [(result.dtype, result.shape) for result in program.results] == [("int32", (4,)), ("bool", (2, 3))]
    assert [result.tiling is not None and result.tiling.is_whole for result in program.results] == [False, True]


def test_arguments_that_are_one_tuple() -> None:
    """As XLA passes them where there are very many."""
    text = HLO.replace("  %p = bf16", "  %unused = bf16").replace("parameter(1), sharding", "copy(%x), sharding")
    text = text.replace(
        "%param = s32[4]{0:T(128)} parameter(0), sharding={devices=[4]<=[4]}",
        "%param = (s32[4]{0}, f32[2]{0}) parameter(0), sharding={{devices=[4]<=[4]}, {replicated}}",
    )
    first, second = read_program(text).arguments
    assert (first.shape, second.shape, first.name) == ((4,), (2,), "")
    assert first.tiling is not None and first.tiling.ways == (4,) and second.tiling is not None


def test_stablehlo_of_the_older_partitioner() -> None:
    program = read_program(STABLEHLO)
    assert (program.num_devices, program.is_of_device) == (4, False)
    a, scalar = program.arguments
    assert (a.name, a.dtype, a.shape) == ("a/b", "uint32", (8, 4)) and a.tiling is not None and a.tiling.ways == (2, 2)
    assert (scalar.dtype, scalar.shape, scalar.tiling) == ("complex64", (), None)
    assert [(result.dtype, result.shape) for result in program.results] == [("bool", ())]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no program that can be read"),
        (HLO.replace("ENTRY", "OTHER"), "no ENTRY"),
        (HLO.replace("parameter(1)", "parameter(2)"), "not whole"),
        (HLO.replace("{{devices=[4]<=[4]}, {replicated}}", "{{replicated}}"), "is for 1 arrays instead of 2"),
        (
            HLO.replace("<=[4]}, metadata", "<=[8]}, metadata").replace("devices=[4]<=[8]", "devices=[8]<=[8]"),
            "names 8",
        ),
        (STABLEHLO.replace("@main", "@other"), "no function @main"),
        (STABLEHLO.replace("8x4", "?x4"), "no static shape"),
        (STABLEHLO[: STABLEHLO.index(") -> ")], "a bracket is not closed"),
    ],
)
def test_what_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        read_program(text)
