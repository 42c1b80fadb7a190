"""Comparison of planners on one model and cluster: predicted, and measured where there are devices.

targets      the steps to plan, with their arguments                 by name, or MODULE:FUNCTION
contenders   the planners to compare                                 by name, with options
row          all figures of one plan                                 a line of JSON
planned      the plans and their prices                              `planned_entries`
measured     one step of each plan in turn, round after round        `in_turn`
verdict      the search against the best manual plan                 `verdict`
report       tables; `chart` (PNG), `page` (HTML)

`alpa-lite bench` runs it; docs/benchmark.md documents it.
"""
