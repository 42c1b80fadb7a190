"""A small convolutional network: data parallel, split over space, one weird trick, and as the search wants it.

python docs/examples/convolutions.py
"""

import jax
import jax.numpy as jnp
from jax import lax

import alpa_lite as al

BATCH, SIDE, CHANNELS, CLASSES = 64, 64, 128, 1000


def convolve(x, kernel, stride=1):
    """3 × 3, as many pixels out as in, divided by the stride."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def train_step(params, batch):
    """A plain train step."""

    def loss_fn(params):
        x = jax.nn.relu(convolve(batch["image"], params["stem"], 2))
        for kernel in params["blocks"]:
            x = x + jax.nn.relu(convolve(x, kernel))
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["dense"])
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logits, batch["label"][:, None], axis=1))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), loss


def main():
    """What each plan would take on eight V100s."""
    shape = jax.ShapeDtypeStruct
    pixels = (SIDE // 2) ** 2
    params = {
        "stem": shape((3, 3, 3, CHANNELS), jnp.float32),
        "blocks": [shape((3, 3, CHANNELS, CHANNELS), jnp.float32)] * 4,
        "dense": shape((pixels * CHANNELS, 1024), jnp.float32),
        "head": shape((1024, CLASSES), jnp.float32),
    }
    batch = {"image": shape((BATCH, SIDE, SIDE, 3), jnp.float32), "label": shape((BATCH,), jnp.int32)}
    p = al.planners
    plans = [
        al.plan(train_step, params, batch, cluster="p3.16xlarge", planner=planner)
        for planner in (p.DataParallel(), p.ConvolutionParallel(sample=4, height=2), p.OneWeirdTrick(), p.Auto())
    ]
    for plan in plans:
        print(f"{plan.name:36} {1e3 * plan.prediction.step_seconds:7.2f} ms")
    print(plans[0].diff(plans[-1]))


if __name__ == "__main__":
    main()
