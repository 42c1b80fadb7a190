"""Devices are described by measuring them.

Comes in: the devices of this process. Goes out: a cluster whose constants explain the times that were measured
(`calibrate`), kept for the next time under a fingerprint of the devices (`device_fingerprint`).
Read `calibrate` first, then `probes` and `fit`.
"""
