"""Primitives of JAX that have no rule and are not inlined, with the reason: each device runs them whole."""

from __future__ import annotations

FAMILIES = {
    "a region written for the devices by hand, and what only stands inside one": (
        "shard_map all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start "
        "all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done "
        "pbroadcast_start pmax pmin ppermute ppermute_done ppermute_start precv preduced psend psum psum_done "
        "psum_invariant psum_invariant_start psum_start pvary ragged_all_to_all reduce_scatter reduce_scatter_done "
        "reduce_scatter_start reduced_vary_cast_p unreduced_psum unreduced_psum_start unreduced_reduce_scatter "
        "unreduced_reduce_scatter_start vary_unreduced_cast_p unreduced_pmax unreduced_pmin "
        "pbroadcast_dynamic reduced_vary_cast vary_unreduced_cast"
    ),
    "sharding as part of the type, which a plan is there to find": "reshard relayout",
    "a kernel, and what only stands inside one": (
        "core_map mpmd_map broadcast_to multiple_of reciprocal run_scoped with_memory_space_constraint"
    ),
    "code that JAX cannot look into": (
        "ffi_call call_exported cudnn_fusion pure_callback io_callback debug_callback debug_print"
    ),
    "mutable references and effects keep their order": (
        "get swap addupdate run_state create_linear pin unpin after_all create_token check dce_sink inspect_sharding "
        "shape_assertion"
    ),
    "stands in a program only while JAX transforms it": (
        "custom_lin empty2 stage unreachable to_edtype from_edtype dim_as_value dimension_size platform_index"
    ),
    "the inside of a random draw, which a traced program holds as random_bits": (
        "iota_2x32_shape philox2x32 philox4x32 threefry4x32"
    ),
    "draws from a state of the device's own, so no two devices would agree on blocks": "rng_uniform",
    "JAX has no batches of it, and a matrix must be whole": "cholesky_update spsolve",
    "sparse arrays, whose indices are data": (
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general "
        "bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense "
        "coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec "
        "csr_spmm csr_spmv csr_todense todense"
    ),
    "the inside of a wrapper that has a rule": ("dot_product_attention_fwd dot_product_attention_bwd scaled_matmul"),
    "one of NVIDIA's fused kernels: nothing here can test a rule against it": (
        "dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd "
        "dot_product_attention_fp8_fwd_wrapper rnn_bwd rnn_fwd"
    ),
}
OPAQUE = {name: reason for reason, names in FAMILIES.items() for name in names.split()}
