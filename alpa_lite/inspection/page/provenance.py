"""The foot of a page: version and date, the cluster with its links and memory, the fingerprint, how to repeat it."""

from __future__ import annotations

import datetime
import sys
from html import escape

from alpa_lite.plan.plan import Plan
from alpa_lite.text import show_count
from cost_models.cluster import Cluster, known_clusters


def provenance_html(plan: Plan) -> str:
    """Return where a plan comes from, as a list of terms."""
    cluster, listed = plan.cluster, list[tuple[str, str]]()
    listed.append(("cluster", f"{escape(cluster.name)}: {escape(cluster_words(cluster))}"))
    listed += [(name, escape(text)) for name, text in cluster.hardware()]
    listed.append(("fingerprint of the step", f"<code>{escape(plan.fingerprint)}</code>"))
    listed += [("again", f"<code>{escape(line)}</code>") for line in commands(plan)]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    # The package is loaded, as this module is a part of it; to import it would be to import all rooms above this one.
    version = vars(sys.modules["alpa_lite"])["__version__"]
    listed.append(("written", f"{today} by alpa_lite {escape(version)}"))
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in listed)
    return f'<footer><h2>Where this comes from</h2><dl class="origin">{rows}</dl></footer>'


def cluster_words(cluster: Cluster) -> str:
    """Return the size of a cluster in words, such as `8 hosts of 8 devices`."""
    shared = ", virtual: those of a host share one processor" if cluster.shared_processor else ""
    return f"{show_count(cluster.num_hosts, 'host')} of {show_count(cluster.devices_per_host, 'device')}{shared}"


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
