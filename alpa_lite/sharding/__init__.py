"""Sharding: the layout of arrays on logical meshes, and the communication that changes it.

Comes in: a logical mesh (`meshes`) and a spec (`specs`), which says which mesh axes split which dims of an array.
Goes out: the cheapest sequence of collectives from one spec to another (`reshard`), the boxes that are sent from one
submesh to another (`transfer`), and the layout of stacked arrays between steps (`stacked_rest`).
Read `specs` first.
"""
