"""Plan files: what is written comes back, a changed file is refused, nothing stands for something of another kind."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.plan import codec
from alpa_lite.plan.codec import CHECKSUM, INLINE, decode, encode, read_file, to_text
from cost_models.checks import printable


class Colour(StrEnum):
    """Two values."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Plain fields."""

    whole: int
    fraction: float
    text: str
    truth: bool
    colour: Colour = Colour.RED


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Containers of all kinds."""

    inner: Inner
    pairs: tuple[tuple[str, float], ...]
    two: tuple[int, int]
    numbered: Mapping[int, Inner]
    named: Mapping[str, tuple[int | None, ...]]
    maybe: Inner | None = None


INNERS = st.builds(
    Inner,
    whole=st.integers(-(2**62), 2**62),
    fraction=st.floats(allow_nan=False),
    text=st.text(),
    truth=st.booleans(),
    colour=st.sampled_from(Colour),
)
OUTERS = st.builds(
    Outer,
    inner=INNERS,
    pairs=st.lists(st.tuples(st.text(max_size=3), st.floats(allow_nan=False)), max_size=3).map(tuple),
    two=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    numbered=st.dictionaries(st.integers(0, 10**6), INNERS, max_size=3),
    named=st.dictionaries(
        st.text(max_size=3), st.lists(st.none() | st.integers(0, 9), max_size=3).map(tuple), max_size=3
    ),
    maybe=st.none() | INNERS,
)


@given(value=OUTERS)
def test_what_is_written_comes_back(value: Outer) -> None:
    assert decode(Outer, json.loads(json.dumps(encode(value), allow_nan=False))) == value


def test_numbers_that_json_does_not_know_come_back() -> None:
    inner = Inner(whole=0, fraction=math.nan, text="", truth=False)
    assert math.isnan(decode(Inner, json.loads(json.dumps(encode(inner), allow_nan=False))).fraction)


GOOD: dict[str, Any] = {"whole": 1, "fraction": 0.5, "text": "x", "truth": True}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("whole", value) for value in (True, 1.0, "1", None, [], {}, 2**63, -(2**63), 10**400)],
        *[("fraction", value) for value in (True, "0.5", "Infinity", None, [], 10**400)],
        *[("text", value) for value in (1, None, [], True, {})],
        *[("truth", value) for value in (1, 0, "true", None)],
        *[("colour", value) for value in ("green", "RED", None, [], {}, 1)],
        ("unknown", 1),
        ("__class__", "x"),
    ],
)
def test_nothing_stands_for_another_kind(key: str, value: Any) -> None:
    assert decode(Inner, GOOD) == Inner(whole=1, fraction=0.5, text="x", truth=True)
    with pytest.raises(PlanError):
        decode(Inner, {**GOOD, key: value})


@pytest.mark.parametrize("key", ["1.0", "-1", "01", " 1", "1e3", "", "x", "١", "9" * 30])
def test_keys_that_should_be_numbers_are_plain_ones(key: str) -> None:
    wanted = Mapping[int, int]
    assert decode(wanted, {"0": 1, "10": 2}) == {0: 1, 10: 2}
    with pytest.raises(PlanError, match="needs a number"):
        decode(wanted, {key: 1})


@pytest.mark.parametrize("data", [None, 3, "text", [], [[]], {"inner": []}])
def test_what_is_no_object_is_a_sentence(data: Any) -> None:
    with pytest.raises(PlanError):
        decode(Outer, data)


def test_long_junk_is_cut_in_messages() -> None:
    with pytest.raises(PlanError) as caught:
        decode(Inner, {**GOOD, "whole": "x" * 10**6})
    assert len(str(caught.value)) < 200


@given(
    data=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False) | st.text(), max_size=5)
)
def test_files_keep_their_content(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("file") / "file.json"
    data.pop(CHECKSUM, None)
    try:
        path.write_bytes(to_text(data))
    except PlanError:
        assert any(printable(text) != text for text in (*data, *data.values()) if isinstance(text, str))
        return
    assert read_file(path) == data


def test_a_changed_file_is_refused_unless_its_checksum_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(to_text({"a": 1, "b": [0.1, "ü"]}))
    data = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(data.items())), indent=4))
    assert read_file(path) == {"a": 1, "b": [0.1, "ü"]}  # form is no content
    path.write_text(json.dumps({**data, "a": 2}))
    with pytest.raises(PlanError, match=r'damaged or changed after it was saved.* remove its entry "checksum"'):
        read_file(path)
    del data[CHECKSUM]
    path.write_text(json.dumps({**data, "a": 2}))
    assert read_file(path) == {"a": 2, "b": [0.1, "ü"]}


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 10**6, b'{"a":' * 10**5, b"1" * 10**5, b'{"a": NaN'])
def test_what_is_no_json_is_a_sentence(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(text)
    with pytest.raises(PlanError, match="cannot be read as a plan"):
        read_file(tmp_path / "file.json")


def test_files_without_end_are_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BYTES", 2**20)
    with pytest.raises(PlanError, match="more than 1024 KiB"):
        read_file("/dev/zero")
    with pytest.raises(PlanError, match="cannot be read"):
        read_file("/nowhere/at/all")


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Fields before and after a group."""

    before: int
    inner: Inner = field(metadata=INLINE)
    after: int = 0


@given(inner=INNERS, before=st.integers(0, 9), after=st.integers(0, 9))
def test_a_group_of_fields_is_written_without_a_level_of_its_own(inner: Inner, before: int, after: int) -> None:
    value = Grouped(before=before, inner=inner, after=after)
    data = encode(value)
    assert list(data) == ["before", *encode(inner), *(["after"] if after else [])]
    assert decode(Grouped, json.loads(json.dumps(data, allow_nan=False))) == value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"before": 1, "inner": {"whole": 1, "fraction": 1.0, "text": "", "truth": True}}, "whole"),
        ({"before": 1, "whole": 1, "fraction": 1.0, "text": "", "truth": True, "inner": 1}, "inner"),
        ({"before": 1, "whole": 1, "fraction": 1.0, "text": ""}, "truth"),
        ({"before": 1, "whole": 1.5, "fraction": 1.0, "text": "", "truth": True}, "int"),
    ],
)
def test_a_group_that_is_nested_or_incomplete_is_refused(data: Mapping[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        decode(Grouped, data)


def test_members_of_enums_become_plain_data() -> None:
    """Also where a field is annotated as a str, of which some callers give members of a `StrEnum`."""
    data = encode(Inner(whole=1, fraction=1.5, text=Colour.RED, truth=True, colour=Colour.BLUE))
    assert type(data["text"]) is type(data["colour"]) is str
    assert decode(Inner, data).text == Colour.RED
