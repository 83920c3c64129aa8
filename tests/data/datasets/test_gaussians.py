"""FedBN's synthetic data: means, covariances and shares, estimated from many samples; and its appendix F on them."""

import numpy as np
import pytest
import torch

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.datasets.gaussians import gaussians
from fedshift.evaluation.metrics import evaluate
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.models.mlp import synthetic_mlp
from fedshift.utils.errors import UsageError


def covariance(x: torch.Tensor) -> torch.Tensor:
    return torch.cov(x.double().T)


def test_two_clients_of_ten_dimensions_have_as_many_samples_of_either_class():
    data = gaussians(samples=80, test_samples=40).check()
    assert (data.names, data.classes, data.sample_shape) == (("diagonal", "mixed"), 2, (10,))
    for client in data.clients:
        assert torch.bincount(client.train.y).tolist() == [40, 40]
        assert torch.bincount(client.test.y).tolist() == [20, 20]
        assert client.train.x.dtype == torch.float32


def test_classes_lie_around_minus_one_and_one():
    for client in gaussians(samples=40_000).clients:
        for label in (0, 1):
            mean = client.train.x[client.train.y == label].double().mean(0)
            assert torch.allclose(mean, torch.full((10,), 2.0 * label - 1, dtype=torch.float64), atol=0.04)


def test_one_client_has_the_identity_the_other_also_off_diagonal_entries_in_equal_parts():
    diagonal, mixed = gaussians(samples=80_000, correlation=-0.5).clients
    steps = (torch.arange(10)[:, None] - torch.arange(10)).abs()
    full = (-0.5) ** steps.double()
    identity = torch.eye(10, dtype=torch.float64)
    for label in (0, 1):
        assert torch.allclose(covariance(diagonal.train.x[diagonal.train.y == label]), identity, atol=0.03)
        half = (identity + full) / 2  # the means of both parts are equal
        assert torch.allclose(covariance(mixed.train.x[mixed.train.y == label]), half, atol=0.03)


def test_samples_are_shuffled_keyed_and_of_their_own_in_every_part():
    first, again, other = gaussians(), gaussians(), gaussians(seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    client = first.client("mixed")
    assert client.train.y.diff().abs().sum() > 50
    assert not torch.equal(client.train.x, client.test.x[: len(client.train)])
    assert not torch.equal(client.train.x, first.client("diagonal").train.x)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"samples": 10}, "samples=10: give a multiple of 4"),
        ({"test_samples": 0}, "test_samples=0: give a multiple of 4"),
        ({"correlation": 1}, "correlation=1: must lie between -1 and 1"),
    ],
)
def test_other_choices_are_refused(choice, said):
    with pytest.raises(UsageError, match=said):
        gaussians(**choice)


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
