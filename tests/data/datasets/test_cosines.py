"""FedBN's toy regression: the clients' deviations, targets and noise, and what figures 1 and 2 say of it."""

import numpy as np
import pytest

import fedshift
from fedshift.data.datasets.cosines import cosines
from fedshift.utils.errors import UsageError


@pytest.mark.parametrize("labels", ["content", "input"])
def test_targets_are_cosines_of_the_content_or_of_the_input(labels):
    data = cosines(samples=20_000, labels=labels).check()
    assert (data.names, data.outputs, data.sample_shape) == (("narrow", "wide"), "1 target", (1,))
    for client, deviation in zip(data.clients, (1, 2.5), strict=True):
        x, y = client.train.x.double().numpy(), client.train.y.numpy()
        assert x.std() == pytest.approx(deviation, rel=0.02)
        rest = y - np.cos(x / deviation if labels == "content" else x)
        assert rest.std() == pytest.approx(0.1, rel=0.02)
        assert abs(rest.mean()) < 0.005
        assert not np.isin(client.test.x.numpy(), client.train.x.numpy()).any()


@pytest.mark.parametrize(("choice", "said"), [({"samples": 0}, "at least 1"), ({"labels": "x"}, "unknown labels 'x'")])
def test_other_values_are_refused(choice, said):
    with pytest.raises(UsageError, match=said):
        cosines(**choice)


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "misfit"), [("content", "fedavg"), ("input", "silobn")])
def test_fedbn_fits_both_clients_and_averaged_statistics_or_an_averaged_gamma_neither(labels, misfit):
    settings = {"model": "cosine", "batch_size": 0, "rounds": 100, "lr": 0.1, "evaluate_every": 100}
    data = f"cosines(labels={labels!r})"
    run = fedshift.compare(f"fedbn,{misfit}", data=data, engine="sequential", **settings)
    table = run.table().xs("mean", axis=1, level=1).loc[["narrow", "wide"]]
    assert (table["fedbn"] < 0.12).all()  # the noise alone is 0.1
    assert (table[misfit] > 0.25).all()
