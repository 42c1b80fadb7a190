"""Intra-op parallelism: choose one sharding strategy per op, at least cost, within the memory of a device."""
