"""The model zoo: plain JAX models and train steps, as a user would write them.

Each model is one frozen dataclass (its sizes) with `init(key) -> params` and `loss_fn(params, batch, key=None)`:

- `mlp`: a stack of dense layers, regression;
- `gpt`: a pre-LN decoder-only transformer, next-token prediction;
- `llama`: a decoder-only transformer with grouped queries and gated feed-forward layers, at the sizes of Llama 3 8B;
- `transformer`: a transformer whose options make GPT, Llama, BERT, T5 and mixtures of experts, with its parts
  `attention`, `feed_forward` and `initial_weights`;
- `bert`: BERT as published, masked words and sentences that follow each other;
- `resnet`: ResNet-50 and Wide-ResNets;
- `convnet`: AlexNet and VGG-16;
- `unet`: U-Net, a label per pixel;
- `seq2seq`: LSTM layers that translate, with attention;
- `cnn`: a small convolutional network, image classification;
- `batches`: random batches for all of them;
- `losses`: the cross entropy and the reductions that they share;
- `optimizers`: Adam and LAMB for steps over thousands of arrays;
- `alpa_cases`: the models of Alpa's evaluation, with `model_flops` as the paper counts them;
- `source_text`: the text that the demo trains on;
- `train`: builders of train steps, for any loss and any optimizer in the form of optax.

Nothing here knows of alpa_lite, of meshes or of devices.
"""
