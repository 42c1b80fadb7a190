"""Passes: rewrites of a program that preserve its results.

Input: a graph with its equations. Output: the same program with stacked arrays split into row blocks
(`split_stacked`), constants moved into the loops that read them (`sink_constants`), or sums over the whole batch
computed before the loop over micro-batches (`hoist_data_sums`).
Read `sink_constants` first, which is the shortest.
"""
