"""Networks of libraries by name, with a module in the place of an installed one; ``make zoo`` has the libraries."""

import pickle
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.config.expressions import trust_only
from fedshift.config.spec import CompareSpec
from fedshift.experiments.factory import make_experiment
from fedshift.models import MODELS, _libraries, make_network
from fedshift.models.vision import resnet18
from fedshift.utils.errors import UsageError


@pytest.fixture(autouse=True)
def timm(monkeypatch):
    """The library: pretrained weights are ones, for images scaled by its configuration, if its cache has a file."""

    def create_model(name, *, in_chans, num_classes, width=4, pretrained=False, pretrained_cfg_overlay=None):
        network = nn.Sequential(nn.Conv2d(in_chans, width, 1), nn.Flatten(), nn.LazyLinear(num_classes))
        if pretrained and not pretrained_cfg_overlay:
            raise OSError("no connection")
        if pretrained:
            nn.init.ones_(network[0].weight)
        return network

    made, data = ModuleType("timm"), ModuleType("timm.data")
    made.create_model = create_model
    made.get_pretrained_cfg = lambda _: SimpleNamespace(
        to_dict=lambda: {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.2)}
    )
    data.resolve_data_config = lambda *, pretrained_cfg: pretrained_cfg
    monkeypatch.setitem(sys.modules, "timm", made)
    monkeypatch.setitem(sys.modules, "timm.data", data)


def test_a_network_is_made_for_the_channels_and_classes_with_its_arguments():
    model = MODELS.parse("timm:resnet18(width=6)")
    network = make_network(model, (2, 5, 5), 3)
    assert network[0].weight.shape == (6, 2, 1, 1)
    assert network[2].out_features == 3
    assert MODELS.write(pickle.loads(pickle.dumps(model))) == "timm:resnet18(width=6)"


def test_what_is_absent_downloads_or_is_not_allowed_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"model hf:bert needs .*: pip install transformers"):
        MODELS.parse("hf:bert")
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "transformers")
        patched.setattr(_libraries, "import_module", lambda _: (_ for _ in ()).throw(ModuleNotFoundError(name="tqdm")))
        with pytest.raises(UsageError, match=r"model hf:bert needs the package tqdm: pip install tqdm"):
            MODELS.parse("hf:bert")
    with pytest.raises(UsageError, match=r"pretrained='mine'\): write pretrained=True, or give a file of weights"):
        MODELS.parse("timm:resnet18(pretrained='mine')")
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(UsageError, match=r"pretrained=True\): write pretrained=the name of a checkpoint"):
        MODELS.parse("hf:bert(pretrained=True)")
    with trust_only(()), pytest.raises(UsageError, match="'timm:resnet18' is a function of this machine that nobody"):
        MODELS.parse("timm:resnet18")


CACHED = "timm:resnet18(pretrained=True, pretrained_cfg_overlay={'file': 'here'})"


def make(model, channels=3, **settings):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (4, channels, 2, 2), dtype=np.uint8), np.arange(4) % 2
    spec = CompareSpec(data={"a": (x, y, x, y)}, model=model, methods="fedavg", **settings)
    return make_experiment(spec), x


@pytest.mark.parametrize(("channels", "mean", "std"), [(3, [0.1, 0.2, 0.3], [0.5, 0.5, 0.2]), (1, [0.2], [0.4])])
def test_pretrained_weights_come_with_the_scale_of_their_images(channels, mean, std):
    experiment, x = make(CACHED, channels)
    trial = experiment.make_trial("fedavg", 0)
    assert bool((trial.plan.initial["0.weight"] == 1).all())
    expected = (torch.from_numpy(x) / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    assert torch.allclose(trial.train["a"].inputs(slice(None)), expected, atol=1e-6)
    (notice,) = experiment.data.notices
    assert notice.startswith("scaling of inputs: pixels in [0, 1] minus ")
    assert f"what {CACHED} was trained with" in notice


def test_a_scale_that_is_given_wins_and_random_weights_need_none():
    for model, settings, scale in ((CACHED, {"normalize": "unit"}, (0.0,)), ("timm:resnet18", {}, (0.5,))):
        experiment, _ = make(model, **settings)
        assert experiment.data.clients[0].train.normalization.mean == scale
        assert not experiment.data.notices


def test_weights_that_cannot_be_had_are_refused_before_training():
    experiment, _ = make("timm:resnet18(pretrained=True)")
    with pytest.raises(UsageError, match=r"its pretrained weights cannot be had .*no connection.*bring the cache here"):
        experiment.make_trial("fedavg", 0)


def read_guide():
    """The functions of the guide's module, by name."""
    text, functions = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(), {"__name__": "own_networks"}
    exec(re.search(r"```python\n(# own_networks.py\n.*?)```", text, re.DOTALL)[1], functions)
    return functions


def test_a_network_of_torchvision_comes_by_the_function_of_the_guide(monkeypatch):
    stand_in = ModuleType("torchvision.models")  # the library itself would download weights
    stand_in.resnet18 = lambda weights: {"IMAGENET1K_V1": resnet18}[weights]()
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", stand_in)
    network = make_network(read_guide()["resnet"], (3, 32, 32), 4).eval()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


class Tokens(nn.Module):
    """A network as HuggingFace's: more optional inputs than are given, and an object as the output."""

    def __init__(self, num_labels):
        super().__init__()
        self.embedding, self.classifier = nn.Embedding(9, 4), nn.Linear(4, num_labels)

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, labels=None, **kwargs):
        assert not kwargs
        assert labels is token_type_ids is None
        mask = attention_mask[..., None].float()
        return SimpleNamespace(logits=self.classifier((self.embedding(input_ids) * mask).sum(1) / mask.sum(1)))


def test_a_network_of_huggingface_is_given_tokens_and_mask_by_name(monkeypatch):
    made = ModuleType("transformers")
    made.AutoConfig = SimpleNamespace(for_model=lambda name, **given: {"name": name, **given})
    made.AutoModelForSequenceClassification = SimpleNamespace(
        from_config=lambda config: {"bert": Tokens}[config.pop("name")](**config)
    )
    monkeypatch.setitem(sys.modules, "transformers", made)
    rng, y = np.random.default_rng(0), np.arange(6) % 2
    x = {"attention_mask": np.tril(np.ones((6, 6), np.int64)), "input_ids": rng.integers(0, 9, (6, 6))}
    spec = CompareSpec(data={"a": (x, y, x, y)}, model="hf:bert", methods="fedavg")
    experiment = make_experiment(spec)
    trial = experiment.make_trial("fedavg", 0)
    trial.advance()
    network = trial.make_network()
    assert network.state_dict().keys() == trial.server.shared.keys() == Tokens(2).state_dict().keys()
    network.load_state_dict(trial.server.shared)
    given = {name: torch.from_numpy(each) for name, each in x.items()}
    (row,) = (row for row in trial.evaluate() if row["split"] == "test" and row["model"] == "global")
    scores = network(**given)
    assert sum(row["hits"]) == int((scores.argmax(1) == torch.from_numpy(y)).sum())
    assert torch.equal(network(trial.train["a"].inputs(slice(None))), scores)
    assert MODELS.write(experiment.model) == "hf:bert"
    wrong = {"input_ids": x["input_ids"], "mask": x["attention_mask"]}
    for model, inputs, said in (
        ("hf:bert", wrong, r"'input_ids', 'mask', and the network's forward takes input_ids=None, att"),
        ("small-cnn", x, "model small-cnn takes one input, and the data have 'attention_mask', 'input_ids': give a"),
        ("timm:resnet18", x, "model timm:resnet18 takes one input, and the data have"),
        ("auto", x, "model='auto': no network of fedshift takes the inputs 'attention_mask', 'input_ids'"),
    ):
        spec = CompareSpec(data={"a": (inputs, y, inputs, y)}, model=model, methods="fedavg")
        with pytest.raises(UsageError, match=said):
            make_experiment(spec).make_trial("fedavg", 0)
