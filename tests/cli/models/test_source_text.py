"""The dataset: deterministic, shaped as promised, and free of installed packages and tests."""

import numpy as np
import pytest

from alpa_lite.cli.models import source_text as text


@pytest.fixture(scope="module")
def small_text():
    return text.load(max_bytes=50_000)


def test_load_is_deterministic_and_capped(small_text):
    assert small_text.dtype == np.uint8
    assert len(small_text) == 50_000
    np.testing.assert_array_equal(small_text, text.load(max_bytes=50_000))


def test_load_fills_the_default_size():
    assert len(text.load()) == text.DEFAULT_MAX_BYTES


def test_files_are_sorted_and_filtered(tmp_path):
    for name in ["b.py", "a.py", "notes.txt", "tests/t.py", "site-packages/p.py", "pkg/c.py", "pkg/__pycache__/d.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name};")
    (tmp_path / "c.py").symlink_to(tmp_path / "missing.py")  # unreadable: skipped by load
    names = [path.relative_to(tmp_path).as_posix() for path in text.source_files(tmp_path)]
    assert names == ["a.py", "b.py", "c.py", "pkg/c.py"]
    assert text.load(root=tmp_path).tobytes() == b"a.py;b.py;pkg/c.py;"
    assert text.load(7, root=tmp_path).tobytes() == b"a.py;b."


def test_batches_are_deterministic(small_text):
    first = list(text.batches(3, 4, 16, seed=1, text=small_text))
    again = list(text.batches(3, 4, 16, seed=1, text=small_text))
    other = list(text.batches(3, 4, 16, seed=2, text=small_text))
    assert len(first) == 3
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        np.testing.assert_array_equal(a["targets"], b["targets"])
    assert not np.array_equal(first[0]["tokens"], other[0]["tokens"])
    assert not np.array_equal(first[0]["tokens"], first[1]["tokens"])


def test_batches_hold_next_tokens(small_text):
    (batch,) = text.batches(1, 4, 16, text=small_text)
    for array in batch.values():
        assert array.shape == (4, 16)
        assert array.dtype == np.int32
        assert array.min() >= 0
        assert array.max() < text.VOCAB_SIZE
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="seq_len=8"):
        next(text.batches(1, 1, 8, text=np.zeros(8, np.uint8)))
