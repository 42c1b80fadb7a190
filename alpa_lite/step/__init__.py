"""A train step cut into micro-batches, with the proof that the cut is exact.

Comes in: the program of a step at two batch sizes. Goes out: the step as a loop over micro-batches (`split`), cut into
layers (`layers/`) that may recompute their forward pass (`rematerialisation/`), or a sentence why it cannot be cut.
Read `relations` first, then `additivity` and `split`.
"""
