"""Every primitive of JAX has a rule, or is looked into, or is opaque for a stated reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alpa_lite.rules import known_primitives
from alpa_lite.trace import from_jaxpr
from tests.rules.opaque import OPAQUE

ROOT = Path(__file__).parents[2]
#: Modules of JAX that bring primitives of their own.
MODULES = (
    "jax.scipy.linalg jax.nn jax.experimental.pallas jax.experimental.sparse jax.experimental.checkify "
    "jax.experimental.custom_partitioning jax.experimental.layout jax.experimental.io_callback jax.experimental.rnn "
    "jax.ffi jax.export jax.custom_batching jax.custom_transpose jax.experimental.xla_metadata"
).split()
LIST = """
import importlib
for module in {modules}:
    try:
        importlib.import_module(module)
    except ImportError:
        pass
from tests.rules.jax_primitives import jax_primitives
print("\\n".join(jax_primitives()))
"""

#: Calls that are inlined by rules of their own.
INLINED = {"remat", "remat2", "checkpoint", "custom_linear_solve"}


def looked_into(primitive: str) -> bool:
    """True for calls, which are inlined, and for control flow, whose bodies have ops of their own."""
    return primitive in from_jaxpr._CALLS | INLINED | set(from_jaxpr._BODIES)


@pytest.fixture(scope="module")
def of_jax() -> set[str]:
    """All primitives of this JAX, from a process in which no test has added its own."""
    program = LIST.format(modules=MODULES)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_primitive_is_known(of_jax):
    assert len(of_jax) > 200
    assert not {p for p in of_jax if not looked_into(p)} - set(known_primitives()) - set(OPAQUE)


def test_rules_are_for_primitives_that_are_not_looked_into():
    assert not [p for p in known_primitives() if looked_into(p)]


def test_what_is_opaque_has_no_rule_and_is_not_looked_into():
    assert not [p for p in OPAQUE if looked_into(p) or p in known_primitives()]
