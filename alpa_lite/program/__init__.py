"""A program as plain, immutable data, without JAX.

Comes in: nothing; `alpa_lite.trace` builds these values. Goes out: graphs of ops and values (`ir`), the step in its
forward, backward and update phases (`phases`), and how values enter the bodies of loops (`wiring`).
Read `ir` first, then `phases`; `show` prints a graph and `verify` checks one.
"""
