"""Batches: of any model what its loss takes; of text the next bytes."""

import jax
import numpy as np
import pytest

from alpa_lite.cli.models.batches import (
    DEFAULT_MAX_BYTES,
    VOCAB_SIZE,
    draw_batch,
    load_text,
    source_files,
    text_batches,
)
from alpa_lite.cli.models.decoders import GPT, Llama
from alpa_lite.cli.models.encoders import BERT, Translator
from alpa_lite.cli.models.sequential_networks import CNN, MLP, alexnet
from alpa_lite.cli.models.skip_networks import ResNet, UNet
from alpa_lite.cli.models.transformer import Encoder, Transformer

MODELS = [
    BERT(vocab_size=50, num_layers=1, hidden=8, num_heads=2, inner=8, seq_len=8, num_masked=2),
    CNN(image_size=8),
    GPT(num_layers=1, seq_len=4),
    Llama(vocab_size=50, num_layers=1, hidden=8, num_heads=2, num_kv_heads=1, inner=8, seq_len=4),
    MLP(),
    ResNet(image_size=32, channels=2, num_classes=3, stage_sizes=(1, 1)),
    Transformer(num_layers=1, seq_len=4),
    Transformer(num_layers=1, seq_len=4, num_masked=2),
    Transformer(num_layers=1, encoder=Encoder(num_layers=1, seq_len=3), seq_len=4),
    Translator(source_vocab=9, target_vocab=7, num_layers=1, hidden=4, source_len=3, target_len=3),
    UNet(image_size=20, channels=2, depth=1),
    alexnet(image_size=64, width=2, dense=4, num_classes=3),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_batches_are_what_the_loss_takes(model):
    batch = draw_batch(model, 4)
    shapes = model.batch_shapes(4)
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in shapes.items()}
    integers = {name for name, x in batch.items() if np.issubdtype(x.dtype, np.integer)}
    assert integers <= model.limits.keys()
    assert all(0 <= batch[name].min() and batch[name].max() < model.limits[name] for name in integers)
    params = jax.eval_shape(model.init, jax.random.key(0))
    loss = jax.eval_shape(model.loss_fn, params, batch)
    assert loss.shape == () and loss.dtype == np.float32


def test_batches_follow_their_number():
    first, again, other = (draw_batch(MODELS[0], 4, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["tokens"], other["tokens"])


@pytest.fixture(scope="module")
def small_text():
    return load_text(max_bytes=50_000)


def test_load_is_deterministic_and_capped(small_text):
    assert small_text.dtype == np.uint8
    assert len(small_text) == 50_000
    np.testing.assert_array_equal(small_text, load_text(max_bytes=50_000))


def test_load_fills_the_default_size():
    assert len(load_text()) == DEFAULT_MAX_BYTES


def test_files_are_sorted_and_filtered(tmp_path):
    for name in ["b.py", "a.py", "notes.txt", "tests/t.py", "site-packages/p.py", "pkg/c.py", "pkg/__pycache__/d.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name};")
    (tmp_path / "c.py").symlink_to(tmp_path / "missing.py")  # unreadable: skipped by load
    names = [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)]
    assert names == ["a.py", "b.py", "c.py", "pkg/c.py"]
    assert load_text(root=tmp_path).tobytes() == b"a.py;b.py;pkg/c.py;"
    assert load_text(7, root=tmp_path).tobytes() == b"a.py;b."


def test_batches_are_deterministic(small_text):
    first = list(text_batches(3, 4, 16, seed=1, text=small_text))
    again = list(text_batches(3, 4, 16, seed=1, text=small_text))
    other = list(text_batches(3, 4, 16, seed=2, text=small_text))
    assert len(first) == 3
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        np.testing.assert_array_equal(a["targets"], b["targets"])
    assert not np.array_equal(first[0]["tokens"], other[0]["tokens"])
    assert not np.array_equal(first[0]["tokens"], first[1]["tokens"])


def test_batches_hold_next_tokens(small_text):
    (batch,) = text_batches(1, 4, 16, text=small_text)
    for array in batch.values():
        assert array.shape == (4, 16)
        assert array.dtype == np.int32
        assert array.min() >= 0
        assert array.max() < VOCAB_SIZE
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="seq_len=8"):
        next(text_batches(1, 1, 8, text=np.zeros(8, np.uint8)))
