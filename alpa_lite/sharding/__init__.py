"""How arrays lie on devices, and what it takes to move them.

Comes in: a logical mesh (`meshes`) and a spec (`specs`), which says which mesh axes split which dims of an array.
Goes out: the cheapest sequence of collectives from one spec to another (`reshard`), and the boxes that are sent from
one submesh to another (`transfer`).
Read `specs` first.
"""
