"""The joint search over micro-batches, stages, submeshes, logical meshes, schedules and rematerialisation.

Comes in: a request and the numbers of micro-batches to consider (`microbatch_counts`). Goes out: the best stages that
were found (`search`, `refine`), or what would have to change so that something fits (`what_would_fit`).
Read `search` first.
"""
