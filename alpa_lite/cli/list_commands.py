"""Commands that list what there is to name: `clusters` that ship with the package, and `planners`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import cast

import alpa_lite as al
from alpa_lite.cli.command import Command, answer, suggests
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.planners.by_name import PLANNERS, planner_of_name
from alpa_lite.text import show_bytes
from cost_models.cluster import Cluster, cluster_sources, known_clusters
from cost_models.hardware import Link


def run_clusters(given: argparse.Namespace) -> int:
    """Print all clusters that ship with the package, or one with the source of each of its values."""
    if given.name is None:
        clusters = [al.cluster(name) for name in known_clusters()]
        columns = ("name", "devices per host", "memory", "within a host", "between hosts")
        table = Table(title="Clusters", columns=columns, rows=tuple(map(_cluster_row, clusters)))
        lines = ["NAME:HOSTS is a cluster with more hosts: --cluster p3.16xlarge:8, al.cluster('p3.16xlarge:8').", ""]
        answer(given, render(lines, [table]), lambda: {"clusters": [cluster.to_json() for cluster in clusters]})
        return Exit.DONE
    cluster = al.cluster(given.name)
    name = given.name.rpartition(":")[0] if given.name.rpartition(":")[2].isdecimal() else given.name
    sources = cluster_sources(name)
    head = [f"{cluster.name}: {cluster.num_hosts} × {cluster.devices_per_host} devices", ""]
    parts = {part: values for part, values in cluster.to_json().items() if isinstance(values, dict)}
    rows = [
        (f"{part}.{key}", str(value), sources.get(f"{part}.{key}", ""))
        for part, values in parts.items()
        for key, value in cast("dict[str, object]", values).items()
    ]
    table = Table(title="Values", columns=("what", "value", "source"), rows=tuple(rows))
    answer(given, render(head, [table]), lambda: {"cluster": cluster.to_json(), "sources": sources})
    return Exit.DONE


def _cluster_row(cluster: Cluster) -> tuple[str, ...]:
    def link(of: Link) -> str:
        return f"{show_bytes(of.bandwidth_bytes_per_second)}/s"

    devices = f"{cluster.devices_per_host} × {cluster.device.name}"
    return (
        cluster.name,
        devices,
        show_bytes(cluster.device.memory_bytes),
        link(cluster.intra_host) if cluster.devices_per_host > 1 else "–",
        link(cluster.inter_host),
    )


def run_planners(given: argparse.Namespace) -> int:
    """Print all planners, or one with its options."""
    if given.name is None:
        about = {name: _first_line(kind) for name, kind in PLANNERS.items()}
        lines = ["--planner NAME, with --option NAME=VALUE; in Python al.planners.", ""]
        table = Table(title="Planners", columns=("name", "what it does"), rows=tuple(about.items()))
        answer(given, render(lines, [table]), lambda: {"planners": about})
        return Exit.DONE
    kind = planner_of_name(given.name)
    # All planners are dataclasses.
    options = [
        {"name": field.name, "type": str(field.type), "default": _default(field)}
        for field in fields(cast("type", kind))
    ]
    about = inspect.getdoc(kind) or ""
    rows = tuple((each["name"], each["type"], each["default"]) for each in options)
    table = Table(title="Options", columns=("name", "type", "default"), rows=rows)
    text = render([*about.splitlines(), ""], [table] if rows else [])
    answer(given, text, lambda: {"planner": given.name, "about": about, "options": options})
    return Exit.DONE


def _first_line(kind: type[al.planners.Planner]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _default(field: Field[object]) -> str:
    if field.default is not MISSING:
        return str(field.default)
    return "needed" if field.default_factory is MISSING else str(field.default_factory())


def _name_of(words: Callable[[], tuple[str, ...]], metavar: str) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        suggests(parser.add_argument("name", nargs="?", metavar=metavar, help="one of them, in detail"), words())

    return add


CLUSTERS = Command(
    name="clusters",
    about="list the clusters that can be planned for",
    example="p3.16xlarge",
    run=run_clusters,
    add_arguments=_name_of(known_clusters, "NAME[:HOSTS]"),
)

PLANNERS_COMMAND = Command(
    name="planners",
    about="list the planners, or the options of one",
    example="hybrid",
    run=run_planners,
    add_arguments=_name_of(lambda: tuple(PLANNERS), "NAME"),
)
