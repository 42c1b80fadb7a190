"""Views of a plan as text: tables, differences, timelines, progress bars.

Comes in: a plan. Goes out: text for terminals (rich tables) and data for timeline viewers.
Read `tables` first.
"""
