"""Inter-op parallelism: layers are grouped into pipeline stages, each on a submesh of its own.

Comes in: a request to plan a step for a cluster (`plan_request`). Goes out: the stages that take the least time
together, each solved by `intra_op` (`stage_costs`, `stage_dp`), put together as a `Plan` (`assembly`).
Read `space` first, then `stage_dp`, `stage_costs` and `joint_search`.
"""
