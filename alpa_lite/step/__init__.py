"""A train step cut into micro-batches, and the proof that the cut is exact.

In: the program of a step at two batch sizes. Out: what each value of a micro-batch is of the value of the full batch,
or the sentence that refuses the cut. Read `relations` first, then `additivity`.
"""
