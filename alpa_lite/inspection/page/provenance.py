"""The foot of a page: version and date, the cluster with its links and memory, the fingerprint, how to repeat it."""

from __future__ import annotations

import datetime
from html import escape

import alpa_lite
from alpa_lite.plan.plan import Plan
from alpa_lite.text import show_bytes, show_count, show_seconds
from cost_models.cluster import Cluster, known_clusters
from cost_models.hardware import Device, Link


def provenance_html(plan: Plan) -> str:
    """Return where a plan comes from, as a list of terms."""
    cluster, listed = plan.cluster, list[tuple[str, str]]()
    listed.append(("cluster", f"{escape(cluster.name)}: {escape(cluster_words(cluster))}"))
    listed += [(name, escape(text)) for name, text in hardware(cluster)]
    listed.append(("fingerprint of the step", f"<code>{escape(plan.fingerprint)}</code>"))
    listed += [("again", f"<code>{escape(line)}</code>") for line in commands(plan)]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    listed.append(("written", f"{today} by alpa_lite {escape(alpa_lite.__version__)}"))
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in listed)
    return f'<footer><h2>Where this comes from</h2><dl class="origin">{rows}</dl></footer>'


def cluster_words(cluster: Cluster) -> str:
    """Return the size of a cluster in words, such as `8 hosts of 8 devices`."""
    shared = ", virtual: those of a host share one processor" if cluster.shared_processor else ""
    return f"{show_count(cluster.num_hosts, 'host')} of {show_count(cluster.devices_per_host, 'device')}{shared}"


def hardware(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the devices and links of a cluster, each with its name and its key numbers."""
    if cluster.groups:
        listed: list[tuple[str, str]] = []
        first = 0
        for group in cluster.groups:
            hosts = f"hosts {first}–{first + group.num_hosts - 1}" if group.num_hosts > 1 else f"host {first}"
            listed.append((hosts, f"{_device(group.device)}; inside a host {_link(group.intra_host)}"))
            first += group.num_hosts
    else:
        listed = [("device", _device(cluster.device)), ("inside a host", _link(cluster.intra_host))]
    if cluster.intra_domain is not None:
        listed.append(("in a domain", f"{_link(cluster.intra_domain)}, {cluster.hosts_per_domain} hosts"))
    if cluster.num_hosts > 1:
        listed.append(("between hosts", f"{_link(cluster.inter_host)}, of a whole host"))
    return listed


def _device(device: Device) -> str:
    dtype, rate = max(device.peaks.items(), key=lambda peak: peak[1])
    return (
        f"{device.name}, {show_bytes(device.memory_bytes)} at {device.memory_bandwidth / 1e9:.4g} GB/s, "
        f"{rate / 1e12:.4g} TFLOP/s in {dtype}"
    )


def _link(link: Link) -> str:
    latency = show_seconds(link.latency_seconds)
    return f"{link.bandwidth_bytes_per_second / 1e9:.4g} GB/s each way, latency {latency}"


def commands(plan: Plan) -> tuple[str, ...]:
    """Return what repeats the plan: the search as a command, if the cluster has a name there, and the plan itself."""
    cluster, searched = plan.cluster, plan.name.startswith("auto")
    count = f" --num-microbatches {plan.num_microbatches}" if plan.num_microbatches > 1 else ""
    search = (
        (f"alpa-lite plan MODULE:FUNCTION --cluster {cluster.name}:{cluster.num_hosts}{count}",)
        if searched and cluster.name in known_clusters() and not plan.idle_devices
        else ()
    )
    return (*search, 'al.plan(step, *args, planner=al.Plan.load("plan.json")), after plan.save("plan.json")')
