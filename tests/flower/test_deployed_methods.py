"""Law 1 over a real deployment: every method, between processes that share nothing, is what it is in one."""

import pytest

from fedshift.config.spec import CompareSpec
from fedshift.methods import METHODS
from tests.flower.processes import machines
from tests.flower.sites import same_as_in_process
from tests.flower.test_remote_engine import FEDERATED


@pytest.mark.slow
def test_every_method_is_what_it_is_in_one_process(tmp_path):
    different = {METHODS.parse_all(text)[0].name: text for text in FEDERATED}  # `tuned` alone is FedAvg
    spec = CompareSpec(
        methods=",".join(different.values()),
        domains="pen,photo,print,faded,worn",
        samples=16,
        rounds=2,
        evaluate_every=2,
        lr=0.05,
    )
    with machines(tmp_path, spec, tls=False) as five:
        coordinator = five.serve("--min-clients", 5)
        sites = [five.join(name) for name in five.names]
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites] == [0] * 5
    trials = same_as_in_process(spec, five.served, tmp_path, tmp_path / "reference")
    assert len(trials) == len(different)
