"""A process that joins its job and tells its number."""

import jax

import alpa_lite as al

if __name__ == "__main__":
    al.initialize()
    print(f"process {jax.process_index()} of {jax.process_count()}", flush=True)
