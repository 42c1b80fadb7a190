"""Benchmarks: what alpa_lite is measured on. The models are plain JAX and know nothing of parallelism."""
