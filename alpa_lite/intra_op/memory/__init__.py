"""Device memory of a stage: lifetimes of values, the memory of every strategy, and the rows of the integer program.

Comes in: the part of a step that one stage runs, and the specs that its nodes may choose. Goes out: bytes per device
over time by strategy (`usages`), and the times at which they can exceed the limit (`memory_rows`). Read `liveness`
first; `limits` and `shortage`, outside this package because they run solvers, explain a limit that is too low.
"""
