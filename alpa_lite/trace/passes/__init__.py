"""Passes: rewrites of a program that keep its results.

Comes in: a graph with its equations. Goes out: the same program with stacked arrays split into blocks of rows
(`split_stacked`), constants inside the loops that read them (`sink_constants`), or sums over the whole batch computed
before the loop over micro-batches (`hoist_data_sums`).
Read `sink_constants` first, which is the shortest.
"""
