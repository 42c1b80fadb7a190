"""Views of a plan as text: tables, differences, timelines, progress bars.

Input: a plan. Output: text for terminals (rich tables) and data for timeline viewers.
Read `tables` first.
"""
