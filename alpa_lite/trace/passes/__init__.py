"""Passes: rewrites of a program that preserve its results.

Input: a jaxpr, or a graph with its equations. Output: the same program of plain operations on arrays (`plain_jaxpr`),
with stacked arrays split into row blocks (`split_stacked`), with constants moved into the loops that read them, or with
sums over the whole batch computed before the loop over micro-batches (both `code_motion`).
Read `code_motion` first.
"""
