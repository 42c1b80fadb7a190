"""A program as plain, immutable data, without JAX.

Comes in: nothing; `alpa_lite.trace` builds these values. Goes out: graphs of ops and values, and how values enter the
bodies of loops (`ir`); the step in its forward, backward and update phases (`phases`).
Read `ir` first, then `phases`.
"""
