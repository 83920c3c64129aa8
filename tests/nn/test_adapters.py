"""LoRA: one client's training is peft's, what travels, scopes of norms, merged weights, engines, and refusals.

Without the package peft, a stand-in of its two functions is used, and the comparison with peft itself is skipped.
"""

import copy
import importlib.util
import re
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.config.spec import CompareSpec
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.experiments.trial_notices import describe_adapter
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.nn.adapters import ADAPTERS, Lora, merge_adapters
from fedshift.utils.errors import UsageError

HAS_PEFT = importlib.util.find_spec("peft") is not None


class Adapted(nn.Module):
    """A layer of the stand-in, as peft's: the names of its parts and how it computes."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base_layer, self.factor, weight = base, alpha / rank, base.weight
        convolutional = isinstance(base, nn.Conv2d)
        make = partial(nn.Conv2d, kernel_size=1) if convolutional else nn.Linear
        self.lora_A = nn.ModuleDict({"default": make(weight.shape[1], rank, bias=False).to(weight)})
        self.lora_B = nn.ModuleDict({"default": make(rank, weight.shape[0], bias=False).to(weight)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.factor

    def get_base_layer(self):
        return self.base_layer

    def merge(self):
        product = self.lora_B["default"].weight.flatten(1) @ self.lora_A["default"].weight.flatten(1) * self.factor
        self.base_layer.weight.data += product.view_as(self.base_layer.weight)


Adapted.__module__ = "peft.stand_in"


def provide_peft(monkeypatch):
    """Let the stand-in be imported as peft if peft is not installed."""

    def inject(config, module):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        for name, layer in list(module.named_modules()):
            if re.fullmatch(config["target_modules"], name):
                holder, _, last = name.rpartition(".")
                setattr(module.get_submodule(holder), last, Adapted(layer, config["r"], config["lora_alpha"]))

    if not HAS_PEFT:
        made = ModuleType("peft")
        made.LoraConfig, made.inject_adapter_in_model, made.__spec__ = dict, inject, ModuleSpec("peft", None)
        monkeypatch.setitem(sys.modules, "peft", made)


@pytest.fixture(autouse=True)
def peft(monkeypatch):
    provide_peft(monkeypatch)


def network(shape=(3, 4, 4), classes=4):
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(),
        nn.Linear(32, 6), nn.LayerNorm(6), nn.Linear(6, classes),
    ).double()  # fmt: skip


def make_trial(method, clients=("a", "b"), engine="sequential", targets="linear|pointwise", **settings):
    rng = np.random.default_rng(0)
    data = {
        name: [(rng.normal(at, 1, (6, 3, 4, 4)), np.arange(6) % 4)[i % 2] for i in range(4)]
        for at, name in enumerate(clients)
    }
    settings = {"rounds": 2, "work": Work(batch_size=3, epochs=1), "optimizer": SGD(lr=0.1, momentum=0.0), **settings}
    adapter = Lora(rank=2, targets=targets, alpha=3.0)
    return Trial(
        method, network, federation(data), Settings(engine=engine, adapter=adapter, precision="float64", **settings), 1
    )


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_one_clients_training_is_that_of_peft_alone():
    from peft import LoraConfig, inject_adapter_in_model

    trial = make_trial(fedavg(), ["a"])
    alone = copy.deepcopy(trial.make_network())
    own = inject_adapter_in_model(
        LoraConfig(r=2, lora_alpha=3, target_modules=["0", "5"]), merge_adapters(copy.deepcopy(alone))
    )
    own.load_state_dict(trial.plan.initial, strict=False)
    for name, parameter in own.named_parameters():
        parameter.requires_grad_("lora_" in name or name.split(".")[0] in ("1", "6", "7"))
    optimizer = torch.optim.SGD([each for each in own.parameters() if each.requires_grad], lr=0.1)
    samples = trial.train["a"]
    for _ in range(2):
        for _, index in trial.engine.draw_batches("a", trial.clients["a"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(own.train()(samples.inputs(index, torch.float64)), samples.y[index]).backward()
            optimizer.step()
        trial.advance()
    state, expected = trial.model_state(), own.state_dict()
    assert any("lora_B" in name and bool(tensor.any()) for name, tensor in state.items())
    assert all(torch.allclose(tensor, expected[name], rtol=0, atol=1e-12) for name, tensor in state.items())


@pytest.mark.parametrize("engine", ["stacked", *(["pool"] if HAS_PEFT else [])])
def test_engines_agree_and_norms_follow_the_methods_scope(engine):
    one, other = make_trial(fedbn()), make_trial(fedbn(), engine=engine)
    for trial in (one, other):
        trial.advance()
        trial.close()
    assert one.plan.personal == {name for name in one.plan.initial if name.startswith("1.")}
    lora = {f"{at}.lora_{part}.default.weight" for at in (0, 5) for part in "AB"}
    assert one.plan.sent == lora | {f"{at}.{part}" for at in (6, 7) for part in ("weight", "bias")}
    for client in "ab":
        state, expected = other.model_state(client), one.model_state(client)
        assert all(torch.allclose(state[name], expected[name], rtol=0, atol=1e-12) for name in expected)
    sent = 8 * (2 * (3 + 8) + 2 * (32 + 6) + 2 * 6 + 4 * 6 + 4)
    assert f"a client sends {sent / 1000:.3g} kB a round, " in describe_adapter(one)


def test_merged_weights_are_the_adapted_network_under_its_names():
    trial = make_trial(fedavg())
    trial.advance()
    adapted = trial.make_network()
    adapted.load_state_dict(trial.model_state(), strict=False)
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    outputs = adapted.eval()(x)
    plain = network()
    plain.load_state_dict(merge_adapters(adapted).state_dict())
    assert torch.allclose(plain.eval()(x), outputs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("qkv|proj", "the model has no layer 'qkv' beside its classifier. It has '0', '5': give"),
        ("7", "the model has no layer '7' beside its classifier"),
        ("3", "names layer '3', which has 8 groups: name other layers, such as '0', '5'"),
        ("1", "names layer '1', which is a BatchNorm2d, neither linear nor a convolution"),
    ],
)
def test_targets_that_match_nothing_that_it_can_adapt_are_refused(targets, words):
    with pytest.raises(UsageError, match=f"lora: targets='{targets}'.*{words}".replace("|", r"\|")):
        make_trial(fedavg(), targets=targets)


def test_layers_whose_weights_are_read_without_a_call_are_refused():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 2)

    with pytest.raises(UsageError, match=r"'attention.out_proj', which is read by 'attention' without being called"):
        prepare(fedavg().with_surgery(Lora(targets="out_proj")), Attention(), optimizer=SGD(lr=0.1))


def test_bad_options_and_a_missing_package_are_refused(monkeypatch):
    assert CompareSpec().adapter is None
    for options, words in (
        ({"rank": 0}, "whole number"),
        ({"targets": "a|"}, "joined by"),
        ({"alpha": -1.0}, "above 0"),
    ):
        with pytest.raises(UsageError, match=words):
            Lora(**options)
    with pytest.raises(UsageError, match="adapter is a int: give lora"):
        ADAPTERS.parse(3)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"lora needs the package peft: pip install 'fedshift\[lora\]'"):
        ADAPTERS.parse("lora(rank=4)")
