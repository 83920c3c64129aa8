"""Which Ray cluster the engine works on, and what it refuses: no Ray is started here."""

import logging
import os
import signal
import socket
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedshift.core.kernel import init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.data.samples import Samples
from fedshift.engines import ray
from fedshift.engines.ray import OWN, Ray, _connect
from fedshift.methods.fedavg import fedavg
from fedshift.utils.errors import UsageError

DATA = {"ann": Samples(x=torch.zeros(3, 2), y=torch.zeros(3, dtype=torch.int64))}


def plan_of(loss=nn.functional.cross_entropy):
    return prepare(fedavg(), nn.Linear(2, 2), optimizer=SGD(lr=0.1), loss=loss)


class Known:
    """A module ``ray`` that is imported, but not connected; it takes SIGTERM for itself as Ray does."""

    exceptions = SimpleNamespace(RayError=KeyError)

    def __init__(self, error=None):
        self.error, self.given = error, None

    def is_initialized(self):
        return False

    def init(self, *given, **options):
        self.given = given, options
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.error:
            raise self.error

    def put(self, value):
        return value

    def cluster_resources(self):
        return {"memory": 1.0}


@pytest.fixture
def known(monkeypatch):
    """Put a module ``ray`` in place, and ``RAY_ADDRESS``; the environment is put back at the end."""

    def put(address, error=None):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        monkeypatch.setattr(os, "environ", environment | ({"RAY_ADDRESS": address} if address else {}))
        module = Known(error)
        monkeypatch.setitem(sys.modules, "ray", module)
        return module

    yield put
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}


@pytest.mark.parametrize("address", [None, "", "local"])
def test_without_an_address_a_cluster_with_as_many_processors_as_workers_is_started(known, address):
    module = known(address)
    assert _connect(3) is module
    assert module.given == (("local",), {"num_cpus": 3, "include_dashboard": False, **QUIET})
    assert OWN.items() <= os.environ.items()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_cluster_of_the_address_is_joined_as_it_is(known):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for written in (address, f"ray://{address}", "auto"):
            module = known(written)
            assert _connect(3) is module
            assert module.given == ((written,), QUIET)
            assert not OWN.keys() & os.environ.keys()
            assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_an_address_at_which_nothing_answers_is_refused_at_once(known):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    module = known(address)
    with pytest.raises(UsageError, match=f"Ray cannot be used at {address} .*refused.*: set RAY_ADDRESS to a cluster"):
        _connect(None)
    assert module.given is None


@pytest.mark.parametrize("error", [ConnectionError("no cluster"), RuntimeError("Python 3.9"), KeyError("token")])
def test_what_ray_refuses_is_told_and_signals_stay(known, error):
    known("auto", error)
    with pytest.raises(UsageError, match=f"Ray cannot be used at auto .*{error.args[0]}") as caught:
        _connect(None)
    assert caught.value.__cause__ is error
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_cluster_without_processors_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "_connect", lambda workers: Known())
    with pytest.raises(UsageError, match="has no processors: add a host to it by `ray start --address`"):
        next(Ray(plan_of(), DATA, 0).train(init_server(plan_of()), {}))


def test_what_cannot_be_sent_other_devices_and_a_missing_package_are_refused(monkeypatch):
    held = threading.Lock()
    assert "cannot send fedavg" in Ray.refusal(plan_of(loss=lambda outputs, y: outputs.sum() if held else None), DATA)
    elsewhere = {"ann": Samples(x=torch.zeros(3, 2, device="meta"), y=torch.zeros(3, device="meta"))}
    with pytest.raises(UsageError, match="the ray engine uses processors, but the device is meta: use the sequential"):
        Ray(plan_of(), elsewhere, 0)
    monkeypatch.setattr("fedshift.engines.ray.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"the ray engine needs the package ray \(pip install 'fedshift\[ray\]'\): use"
    ):
        Ray(plan_of(), DATA, 0)
