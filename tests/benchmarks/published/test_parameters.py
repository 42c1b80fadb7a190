"""The numbers that were set on measured steps are all found, once each."""

from __future__ import annotations

from benchmarks.published.parameters import FITTED, parameters
from cost_models.catalogue import device_sources, known_devices, known_links, link_sources, read_shipped

MEASURED_STEPS = "benchmarks.published_runs"
"""What sources name where a value was set on measured steps."""


def test_every_value_that_was_set_on_measured_steps_is_a_parameter() -> None:
    found = {(owner, p.name.partition(".")[0]) for p in parameters() for owner in p.owners}
    for names, sources in ((known_devices(), device_sources), (known_links(), link_sources)):
        for name in names:
            for key, source in sources(name).items():
                assert ((name, key) in found) == source.startswith(FITTED), (name, key)
                assert MEASURED_STEPS not in source or source.startswith(FITTED), (name, key)


def test_parameters_are_values_of_their_owners_and_of_nothing_else() -> None:
    for p in parameters():
        assert p.source and p.value > 0
        for owner in p.owners if p.kind in ("device", "link") else ():
            field, _, precision = p.name.partition(".")
            value = read_shipped(f"{p.kind}s", owner)[field]
            assert p.value == (value[precision] if precision else value), (owner, p.name)


def test_devices_of_one_family_share_what_was_set_once() -> None:
    found = [(p.name, p.owners) for p in parameters()]
    assert ("matrix_efficiency.bfloat16", ("a100-sxm-40gb", "a100-sxm-80gb")) in found
    assert sum(name == "skew_seconds" for name, _ in found) == 1, "of all networks"
    # Both came out as 0.8, from different runs.
    v5e, v6e = (("memory_efficiency", (name,)) for name in ("tpu-v5e", "tpu-v6e"))
    assert v5e in found and v6e in found


def test_the_number_of_parameters_does_not_grow() -> None:
    """It is part of the claim: a better fit by more numbers is none."""
    assert len(parameters()) <= 44
