"""Inter-op parallelism: cutting the layers into pipeline stages, each on its own submesh."""
