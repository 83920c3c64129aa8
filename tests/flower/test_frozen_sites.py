"""Sites that train a head on kept features of a frozen backbone give the results of one process, bit for bit."""

import pytest
import torch
from torch import nn

from fedshift.engines import frozen
from tests.flower.processes import machines
from tests.flower.sites import Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for

NETWORK, METHOD = f"{__name__}:network", "fixbn(switch=0)"
FEATURES, SAMPLES, TESTED = 32, 24, 140
"""Values of a sample's features, and training and test samples of a client."""


def network(shape, classes):
    """A network of which only the last layer is trained, and whose BatchNorm has other statistics than a new one."""
    backbone = nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone[1].running_mean.normal_()
    return nn.Sequential(backbone, nn.Flatten(), nn.Dropout(0.2), nn.Linear(FEATURES, classes))


@pytest.mark.parametrize("fits", [True, False])
def test_sites_give_the_bits_of_one_process(fits, tmp_path, monkeypatch, machine):
    """``fits``: whether features fit the limit, which is less than the features of all clients."""
    extract, extracted = frozen.Backbone.extract, []
    monkeypatch.setattr(frozen.Backbone, "extract", lambda own, x: extracted.append(len(x)) or extract(own, x))
    monkeypatch.setattr(frozen, "SPLIT_LIMIT", TESTED * FEATURES * 4 - (not fits))
    spec = spec_for(METHOD, model=NETWORK, samples=SAMPLES)
    sites = sites_of(spec, tmp_path, code=frozenset({NETWORK}))
    assert coordinator(spec, SiteGrid(sites), tmp_path / "run", Heard()).run()
    at_sites = sorted(extracted)
    assert set(at_sites) == ({SAMPLES, TESTED} if fits else set())
    extracted.clear()
    frozen._KEPT.clear()
    same_as_in_process(spec, tmp_path / "run", tmp_path, tmp_path / "reference")
    assert sorted(extracted) == at_sites


@pytest.mark.slow
def test_sites_in_processes_of_their_own_give_the_bits_of_one_process(tmp_path):
    spec = spec_for(METHOD, model=NETWORK, samples=SAMPLES, domains="pen,photo,print,faded,worn")
    with machines(tmp_path, spec, tls=False) as five:
        coordinator = five.serve("--min-clients", 5, "--code", NETWORK)
        sites = [five.join(name, "--code", NETWORK) for name in five.names]
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites] == [0] * 5
    same_as_in_process(spec, five.served, tmp_path, tmp_path / "reference")
