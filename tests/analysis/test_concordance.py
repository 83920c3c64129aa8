"""Discordance by hand, and FedMMB's table 2: FedSMB is concordant with centralized training whatever the labels."""

import math
import os
from pathlib import Path

import pytest

from fedshift.analysis.similarity import CONCORDANT, compute_discordance
from fedshift.config.spec import CompareSpec
from fedshift.experiments.factory import make_experiment
from fedshift.report.concordance import concordance_table
from fedshift.results.summary import read_summary
from fedshift.utils.errors import UsageError

DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))


def test_discordance_by_hand():
    assert compute_discordance([1.0, 2.0, 4.0], [1.0, 1.0, 2.0]) == pytest.approx((0 + 1 + 4) / 3)
    assert compute_discordance([0.5], [0.5]) == 0


def test_losses_that_are_not_finite_are_never_concordant():
    assert math.isnan(compute_discordance([math.inf], [math.inf]))
    assert compute_discordance([math.inf, 1.0], [1.0, 1.0]) == math.inf


@pytest.mark.parametrize("losses", [([], []), ([1.0], []), ([1.0], [1.0, 2.0])])
def test_losses_that_do_not_belong_together_are_refused(losses):
    with pytest.raises(UsageError, match="one of each for every iteration"):
        compute_discordance(*losses)


def deltas(tmp_path, **settings):
    """The discordance of each method to centralized training with batches as many times larger as there are clients."""
    spec = CompareSpec(model="fnn2", batches=1, evaluate_every=1, allow_single_class=True, **settings)
    make_experiment(spec).run(tmp_path)
    table = concordance_table(read_summary(tmp_path))
    assert set(table["rounds"]) == {spec.rounds}
    return table["delta mean"].droplevel("centralized").to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["iid(clients=10)", "labels(clients=10, per_client=1)"])
def test_fedsmb_follows_pooled_training_and_more_batches_a_round_do_not(split, tmp_path):
    found = deltas(
        tmp_path, domains="pen", split=split, samples=20, image_size=8, batch_size=5, rounds=8, lr=0.1,
        methods="fedsmb,fedmmb(batches=4),centralized",
    )  # fmt: skip
    assert found["fedsmb"] < CONCORDANT / 100
    assert found["fedmmb(batches=4)"] > 100 * found["fedsmb"]


if (DATA / "mnist.npz").is_file():

    @pytest.mark.slow
    @pytest.mark.parametrize("split", ["iid(clients={})", "labels(clients={}, per_client=1)"], ids=["iid", "labels"])
    @pytest.mark.parametrize(("clients", "batch_size"), [(10, 50), (100, 5)])
    def test_fedsmb_is_concordant_on_mnist_as_in_table_2(clients, batch_size, split, tmp_path):
        found = deltas(
            tmp_path, data="mnist", split=split.format(clients), batch_size=batch_size, rounds=300, lr=0.01,
            methods="fedsmb,centralized",
        )  # fmt: skip
        assert found["fedsmb"] < CONCORDANT
