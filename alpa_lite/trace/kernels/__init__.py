"""Calls of hand-written kernels: what their equations prove about splitting them.

Input: an equation that calls a kernel. Output: its parameters as plain data, for factor rules (`kernel_params`).
Read `grid_split` first.
"""
