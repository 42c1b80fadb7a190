from collections import Counter
from itertools import combinations, pairwise, permutations

import pytest

from cost_models import ClusterError, known_clusters, known_devices, known_links, load_cluster, load_device
from cost_models.catalogue import device_from_json, device_sources, link_from_json, link_sources, read_shipped


@pytest.mark.parametrize("name", known_devices())
def test_every_device_loads_and_names_its_sources(name: str):
    device = load_device(name)
    assert load_device(name.upper()) == device
    values = {
        key: value for key, value in read_shipped("devices", name).items() if key not in ("sources", "notes", "name")
    }
    needed = set(values) - {"peak_flops"} | {f"peak_flops.{dtype}" for dtype in values["peak_flops"]}
    sources = device_sources(name)
    assert set(sources) == needed
    assert all(len(source) > 4 for source in sources.values())


@pytest.mark.parametrize("name", known_devices())
def test_devices_are_plausible(name: str):
    device = load_device(name)
    assert 7e12 < device.peaks["float32"] <= device.peak("float32") <= device.peak("bfloat16") <= 5e15
    assert 8e9 <= device.memory_bytes <= 300e9 and 100e9 < device.memory_bandwidth <= 8e12
    assert 1 <= device.num_units <= 304
    assert all(0.3 < part <= 0.95 for part in device.efficiencies.values())


@pytest.mark.parametrize("name", known_links())
def test_every_link_loads_and_names_its_sources(name: str):
    data = read_shipped("links", name)
    link = link_from_json({"link": name, "bandwidth_bytes_per_second": 5e10}, name)
    assert link.bandwidth_bytes_per_second == 5e10
    assert set(link_sources(name)) == set(data) - {"sources", "notes"}
    assert (
        0 < link.latency_seconds <= 1e-4
        and 0 <= link.ramp_seconds < 1e-3
        and 0 <= link.skew_seconds < 0.1
        and 0.5 < link.efficiency <= 1
    )


#: Links between 8 V100 of a host, `nvidia-smi topo -m`.
CUBE_MESH = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
]


def most_rings(links: list[list[int]], members: tuple[int, ...]) -> int:
    """How many rings through all members run at once, one link each per pair of neighbours and direction."""
    first, *others = members
    if not others[1:]:
        return links[first][others[0]]
    cycles = [(first, *order) for order in permutations(others) if order[0] < order[-1]]

    def pack(left: dict[frozenset[int], int], start: int) -> int:
        best = 0
        for number in range(start, len(cycles)):
            pairs = [frozenset(pair) for pair in pairwise((*cycles[number], first))]
            if all(left[pair] for pair in pairs):
                taken = {**left, **{pair: left[pair] - 1 for pair in pairs}}
                best = max(best, 1 + pack(taken, number))
                if best == min(sum(links[a][b] for b in members) for a in members) // 2:
                    return best
        return best

    return 2 * pack({frozenset(pair): links[pair[0]][pair[1]] for pair in combinations(members, 2)}, 0)


def groups_of(members: int, stride: int) -> list[tuple[int, ...]]:
    """All groups of a logical mesh; of numbers that do not divide 8, the first devices, which were measured."""
    span = members * stride
    starts = [start for start in range(8) if start % span < stride] if 8 % span == 0 else [0]
    return [tuple(range(start, start + span, stride)) for start in starts]


@pytest.mark.parametrize(
    ("members", "stride"), [(2, 1), (2, 2), (2, 4), (3, 1), (4, 1), (4, 2), (6, 1), (7, 1), (8, 1)]
)
def test_groups_on_a_cube_mesh_have_the_rate_of_their_rings(members: int, stride: int):
    link = link_from_json("nvlink2-cube-mesh", "x")
    rings = min(most_rings(CUBE_MESH, group) for group in groups_of(members, stride))
    assert link.rate(members, stride) == pytest.approx(0.9 * 25e9 * rings, rel=0.1)


def slices_on_the_fullest_link(links: list[list[int]], members: tuple[int, ...]) -> float:
    """Each member sends each other one a slice: directly or, where no link joins them, by way of one other."""
    load: Counter[tuple[int, int]] = Counter()
    for a, b in permutations(members, 2):
        by = max(sorted(members, key=lambda c: -links[a][c]), key=lambda c: min(links[a][c], links[c][b]))
        load.update([(a, b)] if links[a][b] else [(a, by), (by, b)])
    return max(slices / links[a][b] for (a, b), slices in load.items())


@pytest.mark.parametrize(
    ("members", "stride"), [(2, 1), (2, 2), (2, 4), (3, 1), (4, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)]
)
def test_pairs_on_a_cube_mesh_have_the_rate_of_their_fullest_link(members: int, stride: int):
    """Each sends (n-1)/n of the bytes that the rate counts; a slice is 1/n of them."""
    rate = link_from_json("nvlink2-cube-mesh", "x").rate(members, stride, all_to_all=True)
    slices = max(slices_on_the_fullest_link(CUBE_MESH, group) for group in groups_of(members, stride))
    assert rate == pytest.approx((members - 1) * 0.9 * 25e9 / slices)


def test_no_device_or_link_is_there_for_nothing():
    """Each generation of links joins some cluster, and each name is that of one file."""
    used = {str(each) for name in known_clusters() for each in _named_links(name)}
    assert set(known_links()) - used <= {"pcie3", "pcie5", "omni-path", "ici-v2"}
    assert len({load_device(name).name for name in known_devices()}) == len(known_devices())


def _named_links(name: str) -> list[object]:
    data = read_shipped("clusters", name)
    parts = (data["intra_host"], data["inter_host"])
    return [part["link"] if isinstance(part, dict) else part for part in parts]


def test_slower_generations_are_slower():
    for older, newer in (
        ("v100-sxm2-32gb", "a100-sxm-80gb"),
        ("a100-sxm-80gb", "h100-sxm-80gb"),
        ("tpu-v5e", "tpu-v6e"),
    ):
        assert load_device(older).peak("bfloat16") < load_device(newer).peak("bfloat16")
        assert load_device(older).memory_bandwidth < load_device(newer).memory_bandwidth
    generations = [link_from_json(f"nvlink{number}", "x").bytes_per_second for number in (2, 3, 4, 5)]
    assert generations == sorted(generations)


def test_unknown_names_have_the_closest_known_one():
    with pytest.raises(ClusterError, match=r"no device named 'h100'\. Did you mean 'h100-pcie-80gb' or 'h100-sxm-"):
        load_device("h100")
    with pytest.raises(ClusterError, match="no link named 7"):
        link_from_json({"link": 7}, "x")
    with pytest.raises(ClusterError, match="'device' is 7, but a JSON object is needed"):
        device_from_json(7)


def test_devices_of_shipped_clusters_are_shared():
    assert load_cluster("p4d.24xlarge").device == load_cluster("nd-a100-v4").device == load_device("a100-sxm-40gb")
