"""Describe devices by measuring them.

Input: the devices of this process. Output: a cluster whose constants explain the times that were measured
(`calibrate`), stored for the next time under a fingerprint of the devices. Read `calibrate`
first, then `probes` and `measurements`.
"""
