"""BERT of HuggingFace with tokens and a mask, where transformers is installed (`make zoo`): a plain loop's weights."""

import copy

import numpy as np
import pytest
import torch

import fedshift
from fedshift.models import take_output


def test_one_client_is_a_plain_loop_over_tokens_and_mask(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "bert", num_labels=2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        vocab_size=64, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    start = transformers.AutoModelForSequenceClassification.from_config(config)
    rng, y = np.random.default_rng(0), np.arange(16) % 2
    x = {
        "attention_mask": np.tile(np.tril(np.ones((8, 8), np.int64)), (2, 1)),
        "input_ids": rng.integers(0, 64, (16, 8)),
    }
    given = {name: torch.from_numpy(each) for name, each in x.items()}
    found = fedshift.compare(
        data={"a": (x, y, x, y)}, model=lambda *_: take_output(copy.deepcopy(start), "logits"), methods="fedavg",
        rounds=3, seeds=1, lr=0.1, batch_size=0, precision="float64", out=tmp_path / "run", progress=False,
    )  # fmt: skip
    plain = copy.deepcopy(start).double()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        plain(**given, labels=torch.from_numpy(y)).loss.backward()
        sgd.step()
    network = found.model("fedavg")
    for name, expected in plain.state_dict().items():
        assert torch.allclose(network.state_dict()[name], expected, rtol=0, atol=1e-12), name
    assert torch.allclose(network(**given), plain.eval()(**given).logits)
