"""Planners against each other on one model and cluster: predicted, and measured where there are devices.

    targets      which step is planned, on which arguments               by name, or MODULE:FUNCTION
    contenders   which planners                                          by name, with options
    row          what is known of one plan                               a line of JSON
    planned      the plans and their prices                              `planned_entries`
    measured     one step of each plan in turn, round after round        `in_turn`
    verdict      the search against the best manual plan                 `verdict`
    report       tables; `chart` (PNG), `page` (HTML)

`alpa-lite bench` runs it; docs/benchmark.md tells how.
"""
