"""Numbers as people read them."""

import pytest

from alpa_lite.text import (
    read_bytes,
    short_source,
    short_sources,
    show_about,
    show_bytes,
    show_count,
    show_likely,
    show_numbers,
    show_range,
    show_seconds,
    show_usable,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.50 KiB"),
        (20 * 2**20, "20.0 MiB"),
        (300 * 2**30, "300 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_bytes(size, text):
    assert show_bytes(size) == text


def test_usable_memory_names_its_reserve():
    assert show_usable(12e9, 4e9) == "11.2 GiB usable, 3.73 GiB kept for the allocator"
    assert show_usable(12e9, 0, decimals=2) == "11.18 GiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5, "2.50 s"), (0.0123, "12.3 ms"), (0.99999, "1.00 s"), (3e-6, "3.00 µs"), (2e-8, "0.02 µs")],
)
def test_seconds(seconds, text):
    assert show_seconds(seconds) == text


def test_a_range_is_in_the_unit_of_its_time_and_exact():
    assert show_likely(72.0, 64.46, 81.24) == "72.0 s (64.5–81.2)"
    # What is rounded in the time is not rounded in the range.
    assert show_likely(1.004, 0.9004, 1.1004) == "1.00 s (0.90–1.10)"
    assert show_likely(0.9, 0.5, 1.2) == "900 ms (500–1200)"
    assert show_likely(0.0, 0.0, 0.0) == "0 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1, "1 s"), (7.4, "7 s"), (43.2, "45 s"), (58.0, "1 min"), (89.0, "1 min"), (100.0, "2 min"), (1e4, "167 min")],
)
def test_estimates_are_coarse(seconds, text):
    assert show_about(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0–2"), ([0, 1, 4, 6, 7], "0–1, 4, 6–7")]
)
def test_numbers(numbers, text):
    assert show_numbers(numbers) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("/a/long/way/models/gpt.py:12:3 (mlp)", "models/gpt.py:12 (mlp)"),
        ("gpt.py:12", "gpt.py:12"),
        ("C:\\code\\gpt.py:12:3 (f)", "code/gpt.py:12 (f)"),
        ("", ""),
        ("no location", "no location"),
    ],
)
def test_short_source(source, text):
    assert short_source(source) == text


def test_count_and_range():
    assert show_count(1, "micro-batch") == "1 micro-batch"
    assert show_count(2, "micro-batch") == "2 micro-batches"
    assert (show_range(2, 2), show_range(2, 5)) == ("2", "2–5")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("40GB", 4e10), ("40 GiB", 40 * 2.0**30), ("1.5kB", 1500), ("512m", 5.12e8), ("16000", 16000), ("1e9", 1e9)],
)
def test_sizes_are_read(text, expected):
    assert read_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "40 parsecs", "-"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError):
        read_bytes(text)


def test_places_within_a_text():
    text = "when dot at /long/way/models/gpt.py:12:3 (mlp.<locals>.f) runs on float32[2,3]"
    assert short_sources(text) == "when dot at models/gpt.py:12 runs on float32[2,3]"
