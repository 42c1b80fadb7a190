from collections.abc import Callable

import pytest

from cost_models import Link, traffic

SIZES = (2, 3, 4, 5, 7, 8, 12, 16, 64)
# total sent / most sent by one worker / rounds, in units of the buffer; counted on executed message schedules.
ALL_REDUCE_TABLE = {
    traffic.naive_all_reduce: {4: (12, 3, 1), 8: (56, 7, 1), 16: (240, 15, 1)},
    traffic.ring_all_reduce: {4: (6, 1.5, 6), 8: (14, 1.75, 14), 16: (30, 1.875, 30)},
    traffic.tree_all_reduce: {4: (6, 2, 4), 8: (14, 3, 6), 16: (30, 4, 8)},
    traffic.butterfly_all_reduce: {4: (8, 2, 2), 8: (24, 3, 3), 16: (64, 4, 4)},
    traffic.halving_doubling_all_reduce: {4: (6, 1.5, 4), 8: (14, 1.75, 6), 16: (30, 1.875, 8)},
    traffic.double_tree_all_reduce: {4: (6, 1.5, 4), 8: (14, 1.75, 6), 16: (30, 1.875, 8)},
    traffic.parameter_server: {4: (8, 1, 2), 8: (16, 1, 2), 16: (32, 1, 2)},
}
OTHERS = (
    traffic.ring_all_gather,
    traffic.chain_broadcast,
    traffic.recursive_all_gather,
    traffic.pairwise_all_to_all,
    traffic.bruck_all_to_all,
    traffic.tree_broadcast,
    traffic.scatter_gather_broadcast,
    traffic.point_to_point,
)
DEVICES_ONLY = (*[send for send in ALL_REDUCE_TABLE if send is not traffic.parameter_server], *OTHERS)


@pytest.mark.parametrize("send", ALL_REDUCE_TABLE)
@pytest.mark.parametrize("n", [4, 8, 16])
def test_counted_bytes_and_rounds(send: Callable[..., traffic.Traffic], n: int):
    sent = send(1.0, n)
    assert (sent.total_sent_bytes, sent.max_sent_bytes, sent.num_rounds) == ALL_REDUCE_TABLE[send][n]


@pytest.mark.parametrize(("n", "log"), [(2, 1), (4, 2), (8, 3), (16, 4), (1024, 10)])
def test_times_of_the_textbook(n: int, log: int):
    link = Link(bandwidth_bytes_per_second=50.0, latency_seconds=3.0)
    m, a, b = 1000.0, 3.0, 1 / 50
    expected = {
        traffic.naive_all_reduce: (n - 1) * (a + m * b),
        traffic.ring_all_reduce: 2 * (n - 1) * a + 2 * (n - 1) / n * m * b,
        traffic.tree_all_reduce: 2 * log * (a + m * b),
        traffic.butterfly_all_reduce: log * (a + m * b),
        traffic.halving_doubling_all_reduce: 2 * log * a + 2 * (n - 1) / n * m * b,
        traffic.double_tree_all_reduce: 2 * log * a + 2 * (n - 1) / n * m * b,
        traffic.in_network_all_reduce: 2 * (n - 1) * a + (n + 1) / n * m * b,
        traffic.parameter_server: 2 * a + 2 * n * m * b,
        traffic.ring_all_gather: (n - 1) * (a + m / n * b),
        traffic.recursive_all_gather: log * a + (n - 1) / n * m * b,
        traffic.pairwise_all_to_all: (n - 1) * (a + m / n * b),
        traffic.bruck_all_to_all: log * (a + m / 2 * b),
        traffic.chain_broadcast: (n - 1) * a + m * b,
        traffic.tree_broadcast: log * (a + m * b),
        traffic.scatter_gather_broadcast: 2 * log * a + 2 * (n - 1) / n * m * b,
        traffic.point_to_point: a + m * b,
    }
    for send, seconds in expected.items():
        assert send(m, n).seconds(link) == pytest.approx(seconds)


def test_servers_share_the_load():
    assert traffic.parameter_server(1.0, 8, 4).serial_bytes == 2 * 8 / 4
    assert traffic.parameter_server(1.0, 8, 4).total_sent_bytes == 16


@pytest.mark.parametrize("send", DEVICES_ONLY)
def test_one_device_sends_nothing(send: Callable[..., traffic.Traffic]):
    assert send(1.0, 1) == traffic.Traffic()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("send", DEVICES_ONLY)
def test_any_group_size_is_consistent(send: Callable[..., traffic.Traffic], n: int):
    sent = send(1.0, n)
    assert sent.max_sent_bytes <= sent.total_sent_bytes <= n * sent.max_sent_bytes * (1 + 1e-12)
    assert sent.num_serial_messages >= sent.num_rounds >= 1
    assert sent.serial_bytes >= sent.max_sent_bytes


@pytest.mark.parametrize("n", SIZES)
def test_every_sum_moves_at_least_what_it_must(n: int):
    """All but one of the buffers must travel, and all but one of the sums: 2(n-1) buffers at least."""
    for send in ALL_REDUCE_TABLE:
        assert send(1.0, n).total_sent_bytes >= 2 * (n - 1) * (1 - 1e-12)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_counts_of_lecture_slides_that_round_up(n: int):
    """Often printed: ring 2MN in N steps, tree 2NM, naive N^2 M; all count one device or step too many."""
    ring, tree, naive = (
        send(1.0, n) for send in (traffic.ring_all_reduce, traffic.tree_all_reduce, traffic.naive_all_reduce)
    )
    assert (2 * n - ring.total_sent_bytes, 2 * n - tree.total_sent_bytes, n**2 - naive.total_sent_bytes) == (2, 2, n)
    assert (ring.num_rounds, ring.max_sent_bytes) == (2 * (n - 1), 2 * (n - 1) / n)
    assert traffic.butterfly_all_reduce(1.0, n).total_sent_bytes == n * (n.bit_length() - 1)  # printed as it is


@pytest.mark.parametrize("n", [8, 16, 64])
def test_the_ring_has_the_best_bandwidth_and_the_worst_latency(n: int):
    """Slides call the ring best: only its bandwidth term is, its 2(n-1) messages lose when the buffer is small."""
    link = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5)
    sends = {send: send(1.0, n) for send in ALL_REDUCE_TABLE}
    ring = sends[traffic.ring_all_reduce]
    assert ring.serial_bytes == min(sent.serial_bytes for sent in sends.values())
    assert ring.num_serial_messages == max(sent.num_serial_messages for sent in sends.values())
    assert sends[traffic.butterfly_all_reduce].seconds(link) < ring.seconds(link)
    assert traffic.butterfly_all_reduce(1e9, n).seconds(link) > traffic.ring_all_reduce(1e9, n).seconds(link)


def test_a_ramp_lengthens_each_time():
    link = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5, ramp_seconds=3e-3)
    # 1.75 MB: 1.75 ms, and of the ramp the part 1.75 MB / (1.75 MB + 3 ms * 1 GB/s / 3).
    assert traffic.ring_all_reduce(1e6, 8).bandwidth_seconds(link) == pytest.approx(1.75e-3 + 3e-3 * 1.75 / 2.75)
    assert traffic.ring_all_reduce(1e6, 8).latency_seconds(link) == pytest.approx(14e-5)


@pytest.mark.parametrize("n", SIZES)
def test_gathering_twice_is_halving_doubling(n: int):
    half, whole = traffic.recursive_all_gather(1.0, n), traffic.halving_doubling_all_reduce(1.0, n)
    assert 2 * half.num_serial_messages == whole.num_serial_messages
    assert 2 * half.serial_bytes == pytest.approx(whole.serial_bytes)


@pytest.mark.parametrize("n", [4, 8, 16, 64])
def test_butterfly_stops_beating_the_ring_where_it_should(n: int):
    """Equal times: log a + log M b = 2(n-1) a + 2(n-1)/n M b, solved for M."""
    a, rate, log = 1e-5, 1e9, n.bit_length() - 1
    crossover = (2 * (n - 1) - log) * a * rate / (log - 2 * (n - 1) / n)
    link = Link(bandwidth_bytes_per_second=rate, latency_seconds=a)
    for factor, butterfly_wins in ((0.99, True), (1.01, False)):
        butterfly, ring = (
            send(crossover * factor, n).seconds(link)
            for send in (traffic.butterfly_all_reduce, traffic.ring_all_reduce)
        )
        assert (butterfly < ring) == butterfly_wins
