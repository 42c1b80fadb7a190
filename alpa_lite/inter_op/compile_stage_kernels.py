"""Compile the stage DP ahead of its first use: `python -m alpa_lite.inter_op.compile_stage_kernels` (4 s, once)."""

from __future__ import annotations

import numpy as np

from alpa_lite.inter_op.stage_dp import StageTable, solve


def compile_kernels() -> None:
    """Run every kernel on two layers; numba keeps what it compiles on disk."""
    shape = (2, 2, 1, 1)
    table = StageTable(
        seconds=np.ones(shape), max_following_stages=np.ones(shape, dtype=np.int64), submesh_devices=(1,)
    )
    solve(table, num_devices=2, num_microbatches=2)


if __name__ == "__main__":
    compile_kernels()
