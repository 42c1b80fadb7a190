"""Checkpoints: a state, a pytree of arrays that lie anywhere, goes to a folder and comes back in any other places.

In comes the state of a running job with its step and plan; out come folders that survive crashes, second writers and
hostile hands, and the state of the newest one that is undamaged.
Read `checkpoints.py` first, then `folder.py` (which steps count), `saved_arrays.py` (what is in one) and `lease.py`
(who may write).
"""
