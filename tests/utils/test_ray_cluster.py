"""Which Ray cluster is used, and what is refused: no Ray is started here."""

import logging
import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest

from fedshift.utils.errors import UsageError
from fedshift.utils.execution import ray_cluster
from fedshift.utils.execution.ray_cluster import OWN, RayCluster, connect


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
    assert connect(3) is module
    assert module.given == (("local",), {"num_cpus": 3, "include_dashboard": False, **QUIET})
    assert OWN.items() <= os.environ.items()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_cluster_of_the_address_is_joined_as_it_is(known):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for written in (address, f"ray://{address}", "auto"):
            module = known(written)
            assert connect(3) is module
            assert module.given == ((written,), QUIET)
            assert not OWN.keys() & os.environ.keys()
            assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_an_address_at_which_nothing_answers_is_refused_at_once(known):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    module = known(address)
    with pytest.raises(UsageError, match=f"Ray cannot be used at {address} .*refused.*: set RAY_ADDRESS to a cluster"):
        connect(None)
    assert module.given is None


@pytest.mark.parametrize("error", [ConnectionError("no cluster"), RuntimeError("Python 3.9"), KeyError("token")])
def test_what_ray_refuses_is_told_and_signals_stay(known, error):
    known("auto", error)
    with pytest.raises(UsageError, match=f"Ray cannot be used at auto .*{error.args[0]}") as caught:
        connect(None)
    assert caught.value.__cause__ is error
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_cluster_without_processors_is_refused(monkeypatch):
    monkeypatch.setattr(ray_cluster, "connect", lambda processors: Known())
    with pytest.raises(UsageError, match="has no processors: add a host to it by `ray start --address`"):
        RayCluster()
