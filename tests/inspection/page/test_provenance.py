"""The foot of a page."""

import shlex
from dataclasses import replace

import alpa_lite as al
from alpa_lite.cli.entry import build_parser
from alpa_lite.inspection.page.provenance import cluster_words, commands, provenance_html
from cost_models.cluster import HostGroup, slowest_device, slowest_link
from tests.inspection.markup import parse


def test_foot(pipeline_plan):
    words = "".join(parse(provenance_html(pipeline_plan)).words)
    assert al.__version__ in words and pipeline_plan.fingerprint in words
    assert "1 host of 8 devices" in words and "125 TFLOP/s in float16" in words
    assert "between hosts" not in words


def test_hosts_of_two_kinds_are_listed():
    old, new = al.cluster("p3.16xlarge", num_hosts=2), al.cluster("p4d.24xlarge", num_hosts=1)
    groups = tuple(HostGroup(num_hosts=c.num_hosts, device=c.device, intra_host=c.intra_host) for c in (old, new))
    mixed = replace(
        old,
        num_hosts=3,
        groups=groups,
        device=slowest_device([old.device, new.device]),
        intra_host=slowest_link([old.intra_host, new.intra_host]),
    )
    listed = dict(mixed.hardware())
    assert list(listed) == ["hosts 0–1", "host 2", "memory of a host", "between hosts"]
    assert old.device.name in listed["hosts 0–1"] and new.device.name in listed["host 2"]
    assert cluster_words(mixed) == "3 hosts of 8 devices"


def test_the_command_is_one(pipeline_plan):
    assert len(commands(pipeline_plan)) == 1
    search, replay = commands(replace(pipeline_plan, name="auto"))
    given = build_parser().parse_args(shlex.split(search)[1:])
    assert given.cluster == ["p3.16xlarge:1"] and given.num_microbatches == pipeline_plan.num_microbatches
    assert "planner=al.Plan.load" in replay
    # A described cluster has no name on the command line.
    own = replace(pipeline_plan, name="auto", cluster=replace(pipeline_plan.cluster, name="mine"))
    assert len(commands(own)) == 1
