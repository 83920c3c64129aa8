"""FedBN's synthetic data: means, covariances and targets, and what its appendix F and figures 1 and 2 say of them."""

import numpy as np
import pytest
import torch

import fedshift
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.datasets.synthetic import cosines, gaussians
from fedshift.evaluation.metrics import evaluate
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.models.mlp import synthetic_mlp
from fedshift.utils.errors import UsageError


def test_two_clients_of_ten_dimensions_have_as_many_samples_of_either_class():
    data = gaussians(samples=80, test_samples=40).check()
    assert (data.names, data.classes, data.sample_shape) == (("diagonal", "mixed"), 2, (10,))
    for client in data.clients:
        assert torch.bincount(client.train.y).tolist() == [40, 40]
        assert torch.bincount(client.test.y).tolist() == [20, 20]
        assert client.train.x.dtype == torch.float32


def test_classes_lie_around_minus_one_and_one_and_half_of_mixed_has_entries_off_the_diagonal():
    full, identity = (-0.5) ** (torch.arange(10)[:, None] - torch.arange(10)).abs().double(), torch.eye(10)
    for client, known in zip(gaussians(samples=80_000).clients, (identity, (identity + full) / 2), strict=True):
        for label in (0, 1):
            x = client.train.x[client.train.y == label].double()
            assert torch.allclose(x.mean(0), torch.full((10,), 2.0 * label - 1, dtype=torch.float64), atol=0.04)
            assert torch.allclose(torch.cov(x.T), known.double(), atol=0.03)


def test_samples_are_shuffled_keyed_and_of_their_own_in_every_part():
    first, again, other = gaussians(), gaussians(), gaussians(seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    client = first.client("mixed")
    assert client.train.y.diff().abs().sum() > 50
    assert not torch.equal(client.train.x, client.test.x[: len(client.train)])
    assert not torch.equal(client.train.x, first.client("diagonal").train.x)


@pytest.mark.parametrize(
    ("make", "choice", "said"),
    [
        (gaussians, {"samples": 10}, "samples=10: give a multiple of 4"),
        (gaussians, {"correlation": 1}, "correlation=1: must lie between -1 and 1"),
        (cosines, {"samples": 0}, "at least 1"),
        (cosines, {"labels": "x"}, "unknown labels 'x'"),
    ],
)
def test_other_choices_are_refused(make, choice, said):
    with pytest.raises(UsageError, match=said):
        make(**choice)


STEPS = 600


def trained(method, lr, seed):
    """Training loss of each of 600 steps, a round each on all samples, and the first after which none is wrong."""
    work = Work(batch_size=None, epochs=1)
    settings = Settings(rounds=STEPS, work=work, optimizer=SGD(lr=lr), evaluate_every=STEPS, engine="sequential")
    trial = Trial(method, synthetic_mlp, gaussians(seed=seed), settings, seed)
    losses, perfect = [], STEPS + 1
    for step in range(1, STEPS + 1):
        rows = [row for row in trial.advance().rows if row["split"] == "train"]
        losses.append(np.mean([row["loss_sum"] / row["samples"] for row in rows]))
        if step % 10 == 0 and perfect > STEPS:
            found = [
                evaluate(trial.plan, trial.personal_state(c), c.train, trial.data.task, 2)
                for c in trial.measured.clients
            ]
            perfect = step if all(row["hits"] == row["support"] for row in found) else perfect
    return np.array(losses), perfect


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_appendix_f_both_reach_100_percent_and_fedbn_sooner_by_loss_and_by_accuracy(seed):
    """All as the paper has it but the learning rate, 1e-2 for 1e-5.

    The paper leaves open how many samples there are, in which batches, and of which samples its 100 % are. Here they
    are those trained on, 200 a client. On others FedBN has one or two percent fewer right than FedAvg.
    """
    (average, then), (local, sooner) = trained(fedavg(), 1e-2, seed), trained(fedbn(), 1e-2, seed)
    assert sooner < then <= STEPS
    assert average[0] == local[0]
    assert np.mean(local[1:] < average[1:]) > 0.99
    assert local[199] < average[199] / 2


@pytest.mark.slow
def test_appendix_f_at_the_papers_learning_rate_fedbn_is_faster_but_neither_gets_far():
    """600 single steps of 1e-5 take a fifth off the loss of weights drawn from N(0, 10^2): the paper's were others."""
    (average, then), (local, sooner) = trained(fedavg(), 1e-5, 0), trained(fedbn(), 1e-5, 0)
    assert (local[1:] < average[1:]).all()
    assert local[-1] > 0.7 * local[0]
    assert then == sooner == STEPS + 1


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


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "misfit"), [("content", "fedavg"), ("input", "silobn")])
def test_fedbn_fits_both_clients_and_averaged_statistics_or_an_averaged_gamma_neither(labels, misfit):
    settings = {"model": "cosine", "batch_size": 0, "rounds": 100, "lr": 0.1, "evaluate_every": 100}
    data = f"cosines(labels={labels!r})"
    run = fedshift.compare(f"fedbn,{misfit}", data=data, engine="sequential", **settings)
    table = run.table().xs("mean", axis=1, level=1).loc[["narrow", "wide"]]
    assert (table["fedbn"] < 0.12).all()  # the noise alone is 0.1
    assert (table[misfit] > 0.25).all()
