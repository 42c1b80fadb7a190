"""The all-reduces as programs: they sum, and what they send is what the formulas say.

What is sent is counted on the jaxpr, and once more on the HLO text that XLA compiled.
"""

import json
import os
import re
import subprocess
import sys
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from alpa_lite.api.doctor import virtual_cpu_environment
from benchmarks import collectives
from benchmarks.collectives import ALGORITHMS, AXIS, executed_messages, on_mesh

SHAPES = ((), (5,), (3, 8), (16,))


def mesh_of(members):
    return Mesh(np.array(jax.devices()[:members]), (AXIS,))


def draw(members, shape, dtype=np.float32, seed=0):
    drawn = np.random.default_rng(seed).normal(1.0, 3.0, (members, *shape))
    return jnp.asarray(drawn.astype(dtype) if np.dtype(dtype).kind != "i" else np.round(drawn).astype(dtype))


def check_sums(name, num_workers, shapes=SHAPES):
    """Every worker holds what psum gives, and all hold the same bits."""
    algorithm = ALGORITHMS[name]
    members = num_workers + algorithm.num_servers
    arrays = [draw(members, shape) for shape in shapes]
    summed = jax.jit(lambda xs: [on_mesh(algorithm.run, mesh_of(members))(x) for x in xs])(arrays)
    workers = mesh_of(num_workers)
    psum = jax.jit(lambda xs: [on_mesh(lambda x, axis: lax.psum(x, axis), workers)(x) for x in xs])
    expected = psum([x[:num_workers] for x in arrays])
    for result, wanted in zip(summed, expected, strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(result[:num_workers], wanted, rtol=1e-6, atol=1e-6 * scale)
        assert (np.asarray(result) == np.asarray(result)[0]).all()


@pytest.mark.parametrize("num_workers", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_give_what_psum_gives(devices, name, num_workers):
    if num_workers + ALGORITHMS[name].num_servers > len(devices):
        num_workers = len(devices) - ALGORITHMS[name].num_servers
    check_sums(name, num_workers)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.int8, np.complex64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_dtype_that_adds(devices, name, dtype):
    algorithm = ALGORITHMS[name]
    members = 3 + algorithm.num_servers
    rows = draw(members, (7,), dtype)
    result = jax.jit(on_mesh(algorithm.run, mesh_of(members)))(rows)
    assert result.dtype == rows.dtype and result.shape == rows.shape
    wide = np.asarray(rows)[:3].astype(np.complex128 if dtype is np.complex64 else np.float64).sum(0)
    precision = 0.0 if dtype is np.int8 else 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(result)[1].astype(wide.dtype), wide, rtol=precision, atol=10 * precision)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not ALGORITHMS[name].num_servers])
def test_one_device_returns_its_input_and_sends_nothing(devices, name):
    rows = draw(1, (5,))
    assert (on_mesh(ALGORITHMS[name].run, mesh_of(1))(rows) == rows).all()
    assert executed_messages(ALGORITHMS[name], 1, (5,)).sent_messages == (0,)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 6, 7, 8, 12, 16, 17])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_sent_is_what_the_formula_says(name, num_workers):
    """For arrays that N divides, N a power of two or not."""
    algorithm, size = ALGORITHMS[name], 6 * num_workers
    counted = executed_messages(algorithm, num_workers, (6, num_workers), jnp.float32)
    told = algorithm.formula(4.0 * size, num_workers)
    assert sum(counted.sent_bytes) == pytest.approx(told.total_sent_bytes, rel=1e-12)
    assert max(counted.sent_bytes[:num_workers]) == pytest.approx(told.max_sent_bytes, rel=1e-12)
    assert counted.num_rounds == told.num_rounds
    assert max(counted.sent_messages[:num_workers]) <= told.num_serial_messages


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_does_not_divide_is_padded(name):
    """At most n - 1 elements more for each of the two phases and devices."""
    n, size = 5, 23
    counted = executed_messages(ALGORITHMS[name], n, (size,), jnp.float32)
    told = ALGORITHMS[name].formula(4.0 * size, n).total_sent_bytes
    assert told <= sum(counted.sent_bytes) <= told + 4 * 2 * n * (n - 1)


def sent_in_hlo(text, num_devices):
    """Bytes that each device sends by the collective-permutes of an HLO module; loops count their trips."""
    computations, entry, current = {}, "", []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) [^=]*\{$", line.strip())
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        current.append(line)

    def sent_by(name):
        sent = np.zeros(num_devices)
        for line in computations[name]:
            moved = re.search(
                r" = (\w+?)(\d+)\[([\d,]*)\]\S* collective-permute\(.*source_target_pairs=\{(.*?)\}\}", line
            )
            if moved:
                size = int(moved[2]) // 8 * prod(int(n) for n in moved[3].split(",") if n)
                for source, target in re.findall(r"\{?(\d+),(\d+)", moved[4]):
                    sent[int(source)] += size if source != target else 0
            trips = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
            called = (
                re.search(r"(?:body|to_apply)=%?([\w.\-]+)", line) if " while(" in line or " call(" in line else None
            )
            if called:
                assert trips or " call(" in line, line
                sent += (int(trips[1]) if trips else 1) * sent_by(called[1])
        return sent

    return sent_by(entry)


@pytest.mark.parametrize("num_workers", [4, 7])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_compiled_program_sends_the_same(devices, name, num_workers):
    algorithm = ALGORITHMS[name]
    members = num_workers + algorithm.num_servers
    rows = draw(members, (6, num_workers))
    text = jax.jit(on_mesh(algorithm.run, mesh_of(members))).lower(rows).compile().as_text()
    counted = executed_messages(algorithm, num_workers, (6, num_workers))
    assert sent_in_hlo(text, members).tolist() == list(counted.sent_bytes)
    assert sum(counted.sent_bytes) > 0


def test_sixteen_devices():
    """More than the harness has, in a process of its own."""
    program = (
        "from tests.benchmarks.test_collectives import ALGORITHMS, check_sums\n"
        "for name in ALGORITHMS: check_sums(name, 16, [(16,), (3, 8)])\n"
        "print('all equal')"
    )
    environment = {**os.environ, **virtual_cpu_environment(17), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all equal\n"


def test_the_command(devices, capsys):
    assert collectives.main(["--sizes", "2", "8", "16", "--elements", "48", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("the same") == 3 * len(ALGORITHMS)
    assert "share a processor" in out
    assert collectives.main(["--sizes", "3", "16", "--elements", "48", "--repeats", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seconds"] is None for row in rows] == [False] * 6 + [True] * 6


def test_a_program_that_sends_otherwise_is_shown(devices, monkeypatch):
    wrong = {"ring": collectives.Algorithm(run=collectives.naive, formula=ALGORITHMS["ring"].formula)}
    monkeypatch.setattr(collectives, "ALGORITHMS", wrong)
    (row,) = collectives.table_rows([4], 8, 1)
    assert not row.agrees
    assert (row.counted_total, row.counted_max, row.counted_rounds) == (12, 3, 1)
    assert (row.formula_total, row.formula_max, row.formula_rounds) == (6, 1.5, 6)
