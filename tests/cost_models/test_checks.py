"""Text of strangers: what a terminal obeys never reaches it, and JSON is bounded before it is read."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.checks import parse_json, printable

ANY = dict(max_bytes=2**20, max_values=10**5)
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


def _dangerous(text: str) -> bool:
    """By what Unicode says of the characters."""
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return any(
        unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(each) in turning
        for each in text
    )


@given(TEXTS)
def test_printable(text: str) -> None:
    shown = printable(text)
    assert not _dangerous(shown) and printable(shown) == shown
    assert (shown == text) == (not _dangerous(text))
    shown.encode()


def test_printable_keeps_what_it_is_told_to() -> None:
    assert printable("a\n\x1b[1m", keep="\n") == "a\n\\x1b[1m"
    assert printable("naïve 😀 👩\u200d🚀") == "naïve 😀 👩\u200d🚀"


def _depth(data: Any) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _texts(data: Any) -> list[str]:
    if isinstance(data, dict):
        return [*data, *(text for item in data.values() for text in _texts(item))]
    if isinstance(data, list):
        return [text for item in data for text in _texts(item)]
    return [data] if isinstance(data, str) else []


@given(JSON, st.booleans(), st.sampled_from([None, 2]), st.integers(0, 5))
def test_json_is_what_the_library_reads_or_refused(data: Any, escaped: bool, indent: int | None, depth: int) -> None:
    text = json.dumps(data, ensure_ascii=escaped, indent=indent)
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return
    fine = _depth(data) <= depth and not any(map(_dangerous, _texts(data)))
    try:
        assert parse_json(raw, **ANY, max_depth=depth) == data and fine
    except ValueError as error:
        assert not fine and len(str(error)) < 100


@given(JSON)
def test_text_that_nobody_is_shown_may_be_any(data: Any) -> None:
    assert parse_json(json.dumps(data).encode(), **ANY, any_text=True) == data


@given(st.binary(max_size=60) | st.text('[]{},:"\\\\0123456789.eE-+tfn ul', max_size=60).map(str.encode))
def test_what_is_no_json_is_told(raw: bytes) -> None:
    try:
        found = parse_json(raw, **ANY)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 250
    else:
        assert found == json.loads(raw.decode())


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"[1, 2, 3]", "more than"),
        (b"[[[1]]]", "nests 3 deep"),
        (b"[1,2]", None),
        (b"[1,2,3]", None),
        (b"[1,2,3,4]", "values"),
        (b'["a,b,[[[["]', None),
        (b'["a\\",b"]', None),
        (b"[NaN]", "NaN is no number"),
        (b"\xff", "no UTF-8"),
        (b'["\\u001b[2J"]', "cannot be shown"),
        ('["\x9b2J"]'.encode(), "cannot be shown"),
        (b'["\\ud800"]', "cannot be shown"),
        (b'["\\ud83d\\ude00"]', None),
    ],
)
def test_limits(raw: bytes, told: str | None) -> None:
    limits = dict(max_bytes=8 if told == "more than" else 100, max_values=4, max_depth=2)
    if told is None:
        assert parse_json(raw, **limits) == json.loads(raw)
        return
    with pytest.raises(ValueError, match=told):
        parse_json(raw, **limits)


HOSTILE = {
    "brackets": "b'[' * 16_000_000",
    "objects": "b'[' + b'{},' * 5_000_000 + b'1]'",
    "as many as may be": "b'[' + b'{},' * 740_000 + b'1]'",
    "strings": "b'[' + b'\"a\",' * 1_490_000 + b'1]'",
    "quotes": "b'\"' * 16_000_001",
    "backslashes": "b'[\"' + b'\\\\' * 16_000_000",
    "digits": "b'[' + b'1' * 16_000_000 + b']'",
    "wide characters": "('[\"' + 'a' * 16_000_000 + '\U0001f600').encode()",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_take_little_memory(text: str) -> None:
    program = f"""
import resource
from cost_models.checks import parse_json
raw = {text}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse_json(raw, max_bytes=16 * 2**20, max_values=1_500_000)
except ValueError as error:
    assert len(str(error)) < 250, error
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
