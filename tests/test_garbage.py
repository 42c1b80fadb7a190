"""The garbage collector rests within, and only within."""

from __future__ import annotations

import gc

import pytest

from alpa_lite.garbage import uncollected


def test_nothing_is_collected_within() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_errors_end_the_rest() -> None:
    with pytest.raises(ValueError, match="of the user's"), uncollected():
        raise ValueError("of the user's")
    assert gc.isenabled()


def test_who_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
