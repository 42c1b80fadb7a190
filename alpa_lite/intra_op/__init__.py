"""Intra-op parallelism: one sharding strategy for every op of a stage, at least cost, within the memory of a device.

Comes in: the part of a step that one stage runs, a logical mesh and a cost model. Goes out: the integer program
(`problem`, made by `formulate`) with its solution, and what the stage then takes (`solve`).
Read `problem` first, then `strategies`, `formulate` and `solvers/portfolio`.
"""
