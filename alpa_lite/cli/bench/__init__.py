"""Comparison of planners on one model and cluster: predicted, and measured where there are devices.

request      the models and planners to compare                      by name, with options
row          all figures of one plan, and the verdict over rows       a line of JSON
entries      the plans and their prices; one step of each in turn     `planned_entries`, `measured_rows`
report       rows for people                                          tables, charts (PNG), a page (HTML)

`alpa-lite bench` runs it; docs/benchmark.md documents it.
"""
