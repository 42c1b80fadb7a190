"""Benchmarks of alpa_lite. The models are plain JAX and have nothing to do with parallelism."""
