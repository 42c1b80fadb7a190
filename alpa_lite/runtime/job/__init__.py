"""Manage the processes of a job: how they start, agree on values, and end.

`launch` starts them on one machine, `start` joins them to a job, and `consensus` lets them exchange and compare values
without using a device, and agree on when to stop. `channel` connects them for what is decided while a step runs.
`shutdown` ends them together after a failure or a hang, so that none waits for another in vain. `activity` observes
what they do, and `processes` says which devices they have.
"""
