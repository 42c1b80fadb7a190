"""Count the bytes and messages of each collective algorithm, on n devices with equal links.

M is the buffer in the byte convention of `work`, n the number of devices, L = ceil(log2 n), a the latency of a
message, b the seconds per byte. Time is (serial messages) * a + (serial bytes) * b (Traffic.seconds), and the ramp of
the link where it has one.

    all-reduce                                        total sent      rounds
    naive             (n-1)(a + M b)                  n(n-1) M        1 (n-1 messages)   (naive_all_reduce)
    ring              2(n-1) a + 2(n-1)/n M b         2(n-1) M        2(n-1)             (ring_all_reduce)
    tree              2 L (a + M b)                   2(n-1) M        2 L                (tree_all_reduce)
    butterfly         L (a + M b)                     n M L           L                  (butterfly_all_reduce)
    halving-doubling  2 L a + 2(n-1)/n M b            2(n-1) M        2 L                (halving_doubling_all_reduce)
    double tree       2 L a + 2(n-1)/n M b            2(n-1) M        2 L                (double_tree_all_reduce)
    in the network    2(n-1) a + (n+1)/n M b          (n+1) M         2                  (in_network_all_reduce)
    parameter server  2 a + 2 n M/s b                 2 n M           2, s servers       (parameter_server)

    others
    ring              (n-1) a + (n-1)/n M b           (n-1) M         n-1                (ring_all_gather)
    gather            L a + (n-1)/n M b               (n-1) M         L                  (recursive_all_gather)
    pairwise          (n-1) a + (n-1)/n M b           (n-1) M         n-1                (pairwise_all_to_all)
    Bruck             L (a + M/2 b)                   n L M/2         L                  (bruck_all_to_all)
    chain broadcast   (n-1) a + M b                   (n-1) M         n-1                (chain_broadcast)
    tree broadcast    L (a + M b)                     (n-1) M         L                  (tree_broadcast)
    scatter + gather  2 L a + 2(n-1)/n M b            2(n-1) M        2 L                (scatter_gather_broadcast)
    one message       a + M b                         n M             1                  (point_to_point)

Sources: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005 (ring, recursive doubling, halving-doubling, broadcast);
Bruck et al., IEEE TPDS 8(11), 1997 (gather and all-to-all in ceil(log2 n) rounds for any n, which also carries
halving-doubling to n that are no power of two); Li et al., OSDI 2014 (parameter server: the servers' links carry n M/s
each way); Sanders, Speck, Träff, Parallel Computing 35(12), 2009 (two trees, each for half of the buffer, in which
every device is a leaf once and an inner node once: a pipeline of small pieces keeps all links busy, so that only the
depth remains of the trees' rounds). Butterfly on other n folds the r = n - 2^floor(log2 n) surplus devices onto
partners first: 2 rounds and 2 r M more. In the network (NVLink SHARP) the switch sums what it reads from everybody and
spreads the sums, (n+1)/n M per device. Its messages are counted as the ring's, since measured latencies grow that way:
10, 15 and 31 us for 2, 4 and 8 H100 (meta-pytorch/autoparallel, cost_models/nccl_cost_model.py).

Lecture slides often round up: the ring is printed with N steps and 2MN bytes, the tree with 2NM, the naive algorithm
with N^2 M, each one device or step too many; and the ring is called best, which holds for its bandwidth term alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cost_models.hardware import Link, moving_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Byte and message counts of one collective.

    Attributes:
        total_sent_bytes: bytes sent by all devices together.
        max_sent_bytes: bytes sent by the device that sends most.
        num_rounds: number of steps of the algorithm.
        num_serial_messages: number of messages that follow one another on the critical path.
        serial_bytes: bytes that follow one another on the critical path.
    """

    total_sent_bytes: float = 0.0
    max_sent_bytes: float = 0.0
    num_rounds: int = 0
    num_serial_messages: int = 0
    serial_bytes: float = 0.0

    def latency_seconds(self, link: Link) -> float:
        """Return the part of the time that does not depend on the size, in seconds."""
        return self.num_serial_messages * link.latency_seconds

    def bandwidth_seconds(self, link: Link) -> float:
        """Return the part of the time that grows with the size, in seconds."""
        return moving_seconds(self.serial_bytes, link.bytes_per_second, link.ramp_seconds)

    def seconds(self, link: Link) -> float:
        """Return the seconds of the collective where every link equals `link`."""
        return self.latency_seconds(link) + self.bandwidth_seconds(link)


Algorithm = Callable[[float, int], Traffic]
"""Function that returns the traffic of an algorithm, from the bytes of the buffer and the number of devices."""


def _log2(num_devices: int) -> int:
    # ceil(log2 n) in whole numbers, exact for every n.
    return (num_devices - 1).bit_length()


def naive_all_reduce(bytes: float, num_devices: int) -> Traffic:
    """All-reduce in which each device sends its whole buffer to every other device."""
    peers = num_devices - 1
    sent = peers * bytes
    return Traffic(
        total_sent_bytes=num_devices * sent,
        max_sent_bytes=sent,
        # One round, in which each device sends its messages one after the other.
        num_rounds=min(peers, 1),
        num_serial_messages=peers,
        serial_bytes=sent,
    )


def ring_all_reduce(bytes: float, num_devices: int) -> Traffic:
    """All-reduce as reduce-scatter and all-gather of slices of 1/n around a ring."""
    return _evenly(2 * (num_devices - 1), 2 * (num_devices - 1) * bytes, num_devices)


def halving_doubling_all_reduce(bytes: float, num_devices: int) -> Traffic:
    """All-reduce as reduce-scatter by recursive halving and all-gather by recursive doubling."""
    return _evenly(2 * _log2(num_devices), 2 * (num_devices - 1) * bytes, num_devices)


def double_tree_all_reduce(bytes: float, num_devices: int) -> Traffic:
    """All-reduce on two complementary trees, each for half of the buffer; bytes per device are the mean."""
    return _evenly(2 * _log2(num_devices), 2 * (num_devices - 1) * bytes, num_devices)


def in_network_all_reduce(bytes: float, num_devices: int) -> Traffic:
    """All-reduce in the switch: each device sends its buffer once and the sums of its slice once."""
    if num_devices == 1:
        return Traffic()
    sent = (num_devices + 1) / num_devices * bytes
    return Traffic(
        total_sent_bytes=num_devices * sent,
        max_sent_bytes=sent,
        num_rounds=2,
        # As many as a ring has, since measured latencies grow with the number of devices (see the module docstring).
        num_serial_messages=2 * (num_devices - 1),
        serial_bytes=sent,
    )


def tree_all_reduce(bytes: float, num_devices: int) -> Traffic:
    """All-reduce on a binomial tree: reduce to the root, then broadcast, in which the root sends most."""
    rounds = 2 * _log2(num_devices)
    return Traffic(
        total_sent_bytes=2 * (num_devices - 1) * bytes,
        # The root sends the sum to one child in every round of the broadcast.
        max_sent_bytes=rounds // 2 * bytes,
        num_rounds=rounds,
        num_serial_messages=rounds,
        serial_bytes=rounds * bytes,
    )


def butterfly_all_reduce(bytes: float, num_devices: int) -> Traffic:
    """All-reduce by recursive doubling: partners at distance 1, 2, 4, ... exchange whole buffers."""
    exchanges = num_devices.bit_length() - 1
    # Surplus devices hand their buffer to a partner before the exchanges, and receive the result after them.
    surplus = num_devices - 2**exchanges
    rounds = exchanges + (2 if surplus else 0)
    return Traffic(
        total_sent_bytes=(2**exchanges * exchanges + 2 * surplus) * bytes,
        # A partner of a surplus device also returns the sum to it.
        max_sent_bytes=(exchanges + (1 if surplus else 0)) * bytes,
        num_rounds=rounds,
        num_serial_messages=rounds,
        serial_bytes=rounds * bytes,
    )


def parameter_server(bytes: float, num_devices: int, num_servers: int = 1) -> Traffic:
    """All-reduce by pushing to and pulling from servers, the bottleneck; `max_sent_bytes` is per worker."""
    return Traffic(
        total_sent_bytes=2 * num_devices * bytes,
        max_sent_bytes=bytes,
        num_rounds=2,
        num_serial_messages=2,
        # The servers' links carry the pushes and then the pulls of all devices.
        serial_bytes=2 * num_devices * bytes / num_servers,
    )


def ring_all_gather(bytes: float, num_devices: int) -> Traffic:
    """All-gather of `bytes` (the result), slices of 1/n around a ring; backwards, the reduce-scatter of the input."""
    return _evenly(num_devices - 1, (num_devices - 1) * bytes, num_devices)


def recursive_all_gather(bytes: float, num_devices: int) -> Traffic:
    """All-gather of `bytes` (the result) by doubling; read backwards, the reduce-scatter of `bytes` (the input)."""
    return _evenly(_log2(num_devices), (num_devices - 1) * bytes, num_devices)


def pairwise_all_to_all(bytes: float, num_devices: int) -> Traffic:
    """All-to-all in which each pair of devices exchanges its slices directly, one pair after the other."""
    return _evenly(num_devices - 1, (num_devices - 1) * bytes, num_devices)


def bruck_all_to_all(bytes: float, num_devices: int) -> Traffic:
    """All-to-all that moves half of the buffer in each of ceil(log2 n) rounds: fewer messages, more bytes."""
    rounds = _log2(num_devices)
    # Exact for powers of two; for other n, some rounds move less than half.
    return _evenly(rounds, num_devices * rounds * bytes / 2, num_devices)


def tree_broadcast(bytes: float, num_devices: int) -> Traffic:
    """Broadcast on a binomial tree from the root."""
    rounds = _log2(num_devices)
    return Traffic(
        total_sent_bytes=(num_devices - 1) * bytes,
        max_sent_bytes=rounds * bytes,
        num_rounds=rounds,
        num_serial_messages=rounds,
        serial_bytes=rounds * bytes,
    )


def chain_broadcast(bytes: float, num_devices: int) -> Traffic:
    """Broadcast along a chain of devices in small pieces; the last device sends nothing."""
    if num_devices == 1:
        return Traffic()
    return Traffic(
        total_sent_bytes=(num_devices - 1) * bytes,
        max_sent_bytes=bytes,
        # The links of the chain carry successive pieces at once, so that each message delays the last device once.
        num_rounds=num_devices - 1,
        num_serial_messages=num_devices - 1,
        serial_bytes=bytes,
    )


def scatter_gather_broadcast(bytes: float, num_devices: int) -> Traffic:
    """Broadcast in which the root scatters slices and all devices gather them."""
    return halving_doubling_all_reduce(bytes, num_devices)


def point_to_point(bytes: float, num_devices: int) -> Traffic:
    """One message per device (permute, send); a group of one device sends nothing."""
    return _evenly(1, num_devices * bytes, num_devices) if num_devices > 1 else Traffic()


def _evenly(rounds: int, total: float, num_devices: int) -> Traffic:
    """Return traffic in which all devices send equal amounts, so that the serial bytes are those of one device."""
    sent = total / num_devices
    return Traffic(
        total_sent_bytes=total,
        max_sent_bytes=sent,
        num_rounds=rounds,
        num_serial_messages=rounds,
        serial_bytes=sent,
    )
