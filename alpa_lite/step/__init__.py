"""A train step split into micro-batches, with the proof that the split is exact.

Input: the program of a step at two batch sizes. Output: the step as a loop over micro-batches (`split`), clustered into
layers (`layers`) that may recompute their forward pass (`rematerialisation`), or a sentence that says why the step
cannot be split.
Read `relations` first, then `additivity` and `split`.
"""
