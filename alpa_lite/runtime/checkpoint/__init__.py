"""Save a state, a pytree of arrays in any shardings, to a folder, and restore it in any other shardings.

Input: the state of a running job with its step and plan. Output: folders that survive crashes, concurrent writers and
hostile changes, and the state of the newest undamaged one. Read `checkpoints.py` first, then `checkpoint_folder.py`
(which steps count), `saved_arrays.py` (the content of one) and `lease.py` (who may write).
"""
