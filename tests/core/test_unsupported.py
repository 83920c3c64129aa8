"""Pieces of user's networks that need care: lazy layers, complex entries, parametrizations, weight-norm hooks."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fedshift.core.kernel import client_init, init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.step import client_step
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.gn import gn
from fedshift.models import make_network
from fedshift.utils.errors import UsageError

KEY = torch.tensor(0)


def stepped(module, x, method=None):
    plan = prepare(method or fedavg(), module, optimizer=SGD(lr=0.1), sample=x[:1])
    job, _ = client_step(
        plan, client_init(plan, init_client(plan), init_server(plan)), x, torch.arange(len(x)) % 2, KEY
    )
    return plan, {**job.params, **job.rest}


def trained_by_torch(module, x):
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    nn.functional.cross_entropy(module.train()(x), torch.arange(len(x)) % 2).backward()
    sgd.step()
    return module.state_dict()


def test_lazy_layers_get_their_shapes_and_their_statistics_stay_untouched():
    def lazy(shape, classes):
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(classes))

    network = make_network(lazy, (3, 6, 6), 5)
    assert network[3].weight.shape == (5, 64)
    assert int(network[1].num_batches_tracked) == 0
    assert torch.equal(network[1].running_mean, torch.zeros(4))
    assert prepare(fedbn(), network, optimizer=SGD(lr=0.1)).personal


def test_a_lazy_layer_that_never_saw_data_is_refused_by_name():
    with pytest.raises(UsageError, match=r"'0\.weight' of the model has no shape yet"):
        prepare(fedavg(), nn.Sequential(nn.LazyLinear(2)), optimizer=SGD(lr=0.1))


class Spectrum(nn.Module):
    def __init__(self, *, persistent):
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex128), persistent=persistent)

    def forward(self, x):
        return self.layer((x * self.waves).real)


def test_complex_entries_are_refused_by_name_and_hidden_complex_buffers_are_fine():
    with pytest.raises(UsageError, match="'waves' of the model is complex"):
        prepare(fedavg(), Spectrum(persistent=True), optimizer=SGD(lr=0.1))
    x = torch.randn(4, 3, dtype=torch.float64)
    plan, found = stepped(Spectrum(persistent=False), x)
    assert "waves" not in plan.initial
    assert not torch.equal(found["layer.weight"], plan.initial["layer.weight"])


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_layers_train_as_under_torch(parametrize):
    torch.manual_seed(0)
    network = nn.Sequential(parametrize(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    _, found = stepped(network, x)
    expected = trained_by_torch(network, x)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-12, name


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_batch_norm_with_a_parametrization_is_still_batch_norm():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.utils.parametrize.register_parametrization(network[1], "weight", Double())
    plan = prepare(fedbn(), network, optimizer=SGD(lr=0.1))
    assert {name.split(".")[0] for name in plan.personal} == {"1"}
    assert "1.parametrizations.weight.original" in plan.personal
    with pytest.raises(UsageError, match="'1' has a parametrization"):
        prepare(gn(), network, optimizer=SGD(lr=0.1))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("normalize", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_old_hooks_are_refused_by_the_name_of_their_layer(normalize):
    network = nn.Sequential(nn.Linear(3, 4), normalize(nn.Linear(4, 2)))
    with pytest.raises(UsageError, match=r"layer '1' of the model uses the old .*parametrizations"):
        prepare(fedavg(), network, optimizer=SGD(lr=0.1))
