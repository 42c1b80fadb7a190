"""The model zoo: plain JAX models and train steps, as a user would write them.

Each model is one frozen dataclass (its sizes) with `init(key) -> params` and `loss_fn(params, batch, key=None)`:

- `sequential_networks`: a perceptron, a small convolutional network, AlexNet and VGG-16;
- `skip_networks`: U-Net, ResNet-50 and Wide-ResNets;
- `decoders`: GPT-2 and Llama 3, as a user would write them out;
- `encoders`: BERT, and LSTM layers that translate, as published;
- `transformer`: a transformer whose options make GPT, Llama, BERT, T5 and mixtures of experts, of `transformer_layers`.

What they share:

- `model_parts`: their interface (`Model`), weights drawn from shapes, dropout and losses;
- `batches`: random batches for all of them, and the text that the demo trains on;
- `train`: builders of train steps, for any loss and any optimizer in the form of optax, and Adam;
- `alpa_cases`: the models of Alpa's evaluation on its clusters, with their FLOPs as the paper counts them.

No model depends on meshes, devices or plans.
"""
