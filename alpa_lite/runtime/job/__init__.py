"""The processes of a job: how they start, what they agree upon, and how they end.

`launch` starts them on one machine, `start` joins them, and `agreement` lets them say and compare what no device has to
know. `ending`, `hang` and `stopping` end them together, in a failure, in a hang or when they are told to, so that none
waits for another in vain.
"""
