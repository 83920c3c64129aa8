"""Corners of methods and compositions in which a result could be wrong without anybody noticing."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedshift.core.kernel import client_final, client_init, init_client, init_server
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.preparation import apply_surgery, prepare
from fedshift.core.server_round import server_round
from fedshift.core.step import client_step_
from fedshift.methods.agc import agc
from fedshift.methods.centralized import centralized
from fedshift.methods.dp_sgd import dp_sgd
from fedshift.methods.fedap import fedap
from fedshift.methods.fedheal import fedheal
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.fednova import NormalizedAveraging
from fedshift.methods.fedrep import fedrep
from fedshift.methods.fedwon import fedwon
from fedshift.methods.geometric_median import geometric_median
from fedshift.methods.gn import gn
from fedshift.methods.krum import krum
from fedshift.methods.nonorm import nonorm
from fedshift.methods.partialfed_adaptive import partialfed_adaptive
from fedshift.utils.errors import UsageError
from tests.methods import plain
from tests.methods.received import fold

KEY, DATA = torch.tensor(0), plain.data(dict.fromkeys("abc", 8))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.arange(6) % 3


def trial(method, *layers):
    return plain.trial(method, lambda *_: nn.Sequential(*layers), DATA)


class Scaled(nn.Linear):
    """Ends in a trained factor, a parameter without dimensions."""

    def __init__(self, before, after):
        super().__init__(before, after)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.factor * super().forward(x)


@pytest.mark.parametrize("made", [agc, dp_sgd, fedap, fedheal, geometric_median, krum], ids=lambda made: made.__name__)
def test_a_parameter_may_have_no_dimensions(made):
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), Scaled(8, 3))
    running = trial(made(gn(groups=1) if made is dp_sgd else None), *layers)
    running.advance()
    factor = running.model_state("a")["3.factor"]
    assert factor.shape == ()
    assert factor != 2


@pytest.mark.parametrize(
    ("values", "weights", "highest"),
    [
        ([0.0, 1.0, 1e12], [1 / 3] * 3, 1),
        ([0.0, 1.0, 1e9], [0.3, 0.25, 0.45], 1),
        ([0.0, 1.0, 2.0, 1e9, 1e9], [0.2] * 5, 2),
        ([1e18, 0.0, 1.0, 2.0, 3.0, 4.0], [1 / 6] * 6, 4),
    ],
)
def test_a_minority_by_weight_drags_the_geometric_median_nowhere(values, weights, highest):
    states = [{"w": torch.tensor([value], dtype=torch.float64)} for value in values]
    found = fold(geometric_median().aggregator, states, states[0], weights=weights).entries["w"].item()
    assert -1e-3 <= found <= highest + 1e-3


def test_centralized_scales_a_batch_size_that_the_method_sets():
    layers = nn.Flatten(), nn.Linear(16, 3)
    assert trial(centralized(fedmmb(batches=2, batch_size=2)), *layers).plan.work.batch_size == 6


def test_fedreps_body_under_adamw_begins_like_torchs():
    plan = prepare(fedrep(), mlp(), optimizer=AdamW(lr=0.01, weight_decay=0.0))
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=11)
    for _ in range(11):  # ten for the head, one for the body
        before = job.params["0.weight"].clone()
        job, _ = client_step_(plan, job, *batch(), KEY)
    assert ((job.params["0.weight"] - before).abs() / 0.01 - 1).abs().max() <= 1e-3  # Adam's first step is lr


def test_the_gates_are_as_much_faster_as_asked_under_every_optimizer():
    moved = []
    for rate in (1.0, 10.0):
        plan = prepare(partialfed_adaptive(rate=rate), mlp(), optimizer=AdamW(lr=0.01, weight_decay=0.0))
        server, client = init_server(plan), init_client(plan)
        job, _ = client_step_(plan, client_init(plan, client, server, planned_steps=1), *batch(), KEY)
        client, update = client_final(plan, job)
        other = replace(update, shared={name: tensor + 1 for name, tensor in update.shared.items()})
        server = server_round(plan, server, {"a": update, "b": other}, {"a": 1, "b": 1})
        job, _ = client_step_(plan, client_init(plan, client, server, planned_steps=1), *batch(), KEY)
        moved.append(job.params["gates/logits"].abs().max().item())
    assert moved[1] == pytest.approx(10 * moved[0], rel=1e-6)


def test_normalization_is_not_taken_from_a_layer_that_reads_it():
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(UsageError, match=r"not after the method replaced some of its layers .*has no attribute 'eps'"):
        prepare(nonorm(), encoder, optimizer=SGD(lr=0.1), sample=torch.zeros(1, 2, 8))


def test_tied_weights_stay_tied_under_surgery():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
            self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.b.weight, self.second.bias = self.a.weight, self.first.bias

    standardized, grouped = apply_surgery(fedwon(), Net()), apply_surgery(gn(), Net())
    assert standardized.a.weight is standardized.b.weight
    assert grouped.first.bias is grouped.second.bias


def test_what_clients_send_but_do_not_load_is_averaged_by_fednova():
    states = [{"shared": torch.ones(1), "head": torch.full((1,), value)} for value in (1.0, 3.0)]
    before = {"shared": torch.zeros(1), "head": torch.zeros(1)}
    folded = fold(NormalizedAveraging(), states, before, names={"shared"}, steps=[10, 1]).entries
    assert folded["head"].item() == 2.0
    assert folded["shared"].item() == pytest.approx(5.5 * (0.5 / 10 + 0.5 / 1))  # tau = 5.5
