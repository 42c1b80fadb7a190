"""Random batches: of the shapes and within the limits that every model names."""

import jax
import numpy as np
import pytest

from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.bert import BERT
from alpa_lite.cli.models.cnn import CNN
from alpa_lite.cli.models.convnet import alexnet
from alpa_lite.cli.models.gpt import GPT
from alpa_lite.cli.models.llama import Llama
from alpa_lite.cli.models.mlp import MLP
from alpa_lite.cli.models.resnet import ResNet
from alpa_lite.cli.models.seq2seq import Translator
from alpa_lite.cli.models.transformer import Transformer
from alpa_lite.cli.models.unet import UNet

MODELS = [
    BERT(vocab_size=50, num_layers=1, hidden=8, num_heads=2, inner=8, seq_len=8, num_masked=2),
    CNN(image_size=8),
    GPT(num_layers=1, seq_len=4),
    Llama(vocab_size=50, num_layers=1, hidden=8, num_heads=2, num_kv_heads=1, inner=8, seq_len=4),
    MLP(),
    ResNet(image_size=32, channels=2, num_classes=3, stage_sizes=(1, 1)),
    Transformer(num_layers=1, seq_len=4),
    Transformer(num_layers=1, seq_len=4, objective="masked", num_masked=2),
    Transformer(num_layers=1, num_encoder_layers=1, encoder_seq_len=3, seq_len=4),
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
