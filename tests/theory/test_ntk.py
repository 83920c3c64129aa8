"""Gram matrices of FedBN's theory: its equations term by term, autograd, and the closed form against sampling."""

import numpy as np
import pytest
import torch
from torch.func import functional_call, jacrev

from fedshift.models.mlp import two_layer
from fedshift.theory.checks import draw_inputs
from fedshift.theory.ntk import (
    FederatedInputs,
    Network,
    arc_cosine,
    block_diagonal,
    compute_jacobians,
    compute_outputs,
    gram_matrices,
    init_network,
    isotropic_limit,
    magnitude_limit,
    measure_inputs,
    monte_carlo,
    smallest_eigenvalue,
)
from fedshift.utils.errors import UsageError

CLIENTS, COUNT, SIZE = 3, 4, 5


def federation(seed=0, heterogeneity=2.0):
    return measure_inputs(draw_inputs(CLIENTS, COUNT, SIZE, heterogeneity, np.random.default_rng(seed))[0])


def scaled(deviations, seed=0):
    """Clients whose covariances are multiples of the identity."""
    rng, owner = np.random.default_rng(seed), np.repeat(np.arange(len(deviations)), COUNT)
    x = rng.normal(size=(len(owner), SIZE)) * np.array(deviations)[owner][:, None]
    return FederatedInputs(x=x, client=owner, covariance=np.square(deviations)[:, None, None] * np.eye(SIZE))


def trained(samples, width=6, local=True, seed=1):
    """Return a network that differs from an initial one: gammas differ by client, and c are not signs."""
    rng = np.random.default_rng(seed)
    shape = (len(samples.covariance), width) if local else (width,)
    return Network(v=rng.normal(size=(width, SIZE)), gamma=rng.uniform(0.5, 2, shape), c=rng.normal(size=width))


@pytest.mark.parametrize("local", [False, True])
def test_gram_matrices_are_equations_6_to_9_term_by_term(local):
    samples, alpha = federation(), 1.7
    network = trained(samples, local=local)
    found = gram_matrices(samples, network, alpha=alpha)
    for p in range(len(samples.x)):
        for q in range(len(samples.x)):
            direction = magnitude = 0.0
            for k, (v, c) in enumerate(zip(network.v, network.c, strict=True)):
                norms, slopes, aside, hidden = [], [], [], []
                for sample in (p, q):
                    x, client = samples.x[sample], samples.client[sample]
                    s = samples.covariance[client]
                    square = v @ s @ v
                    norms.append(np.sqrt(square))
                    slopes.append((network.gamma[client, k] if local else network.gamma[k]) * (v @ x >= 0))
                    aside.append((np.eye(SIZE) - np.outer(s @ v, v) / square) @ x)
                    hidden.append(max(v @ x, 0))
                below = norms[0] * norms[1] * len(network.c)
                direction += (alpha * c) ** 2 * slopes[0] * slopes[1] * (aside[0] @ aside[1]) / below
                together = not local or samples.client[p] == samples.client[q]
                magnitude += c**2 * hidden[0] * hidden[1] * together / below
            assert found.direction[p, q] == pytest.approx(direction, rel=1e-11, abs=1e-12)
            assert found.magnitude[p, q] == pytest.approx(magnitude, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("local", [False, True])
def test_lambda_is_the_square_of_the_jacobian_that_autograd_finds_of_the_network_itself(local):
    torch.manual_seed(0)
    samples, alpha, model = federation(), 1.7, two_layer((SIZE,), 1, width=40, alpha=1.7).double()
    model.norm.eps = 0.0
    v, c = model.hidden.weight.detach(), model.top.weight[0] * 40**0.5
    gamma = model.norm.weight.detach() * torch.linspace(0.5, 1.5, CLIENTS, dtype=torch.float64)[:, None]
    gamma = gamma if local else gamma[0]
    x = torch.from_numpy(samples.x).view(CLIENTS, COUNT, SIZE)

    def predict(v, gamma):
        clients = []
        for client in range(CLIENTS):
            own = gamma[client] if local else gamma
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            state |= {"hidden.weight": v, "norm.weight": own}
            clients.append(functional_call(model, state, (x[client],))[:, 0])
        return torch.cat(clients)

    by_v, by_gamma = (part.flatten(1).numpy() for part in jacrev(predict, argnums=(0, 1))(v, gamma))
    network = Network(v=v.numpy(), gamma=gamma.numpy(), c=c.numpy())
    np.testing.assert_allclose(compute_outputs(samples, network), predict(v, gamma), rtol=0, atol=1e-12)
    found = gram_matrices(samples, network, alpha=alpha)
    np.testing.assert_allclose(found.direction / alpha**2, by_v @ by_v.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.magnitude, by_gamma @ by_gamma.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        found.evolution(alpha), np.hstack([by_v, by_gamma]) @ np.hstack([by_v, by_gamma]).T, rtol=0, atol=1e-12
    )


def test_at_the_start_fedbn_differs_from_fedavg_in_the_blocks_of_g_alone_and_alpha_in_neither():
    samples = federation()
    shared = gram_matrices(samples, init_network(64, SIZE, np.random.default_rng(3)))
    local = gram_matrices(samples, init_network(64, SIZE, np.random.default_rng(3), clients=CLIENTS))
    wide = gram_matrices(samples, init_network(64, SIZE, np.random.default_rng(3), alpha=7.0), alpha=7.0)
    np.testing.assert_array_equal(local.direction, shared.direction)
    np.testing.assert_array_equal(local.magnitude, block_diagonal(samples, shared.magnitude))
    np.testing.assert_allclose(wide.direction, shared.direction, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(wide.magnitude, shared.magnitude, rtol=1e-10, atol=1e-12)
    assert local.magnitude[0, -1] == 0 != shared.magnitude[0, -1]


def test_a_negative_gamma_turns_the_neuron_around():
    samples = federation()
    network = trained(samples, local=False)
    turned = Network(v=-network.v, gamma=-network.gamma, c=network.c)
    np.testing.assert_allclose(compute_outputs(samples, turned), compute_outputs(samples, network), rtol=0, atol=1e-14)
    for ours, theirs in zip(compute_jacobians(samples, turned), compute_jacobians(samples, network), strict=True):
        np.testing.assert_allclose(ours, -theirs, rtol=0, atol=1e-14)


def test_arc_cosine_kernels_at_known_angles():
    both, magnitude = arc_cosine(np.array([4.0, 0.0, -4.0, 2.0]), np.full(4, 4.0), np.full(4, 4.0))
    np.testing.assert_allclose(both, [1 / 2, 1 / 4, 0, 1 / 3], atol=1e-15)
    sixty = (np.sqrt(3) / 2 + np.pi / 3) / (2 * np.pi)
    np.testing.assert_allclose(magnitude, [2, 2 / np.pi, 0, 4 * sixty], atol=1e-15)


def test_the_integral_is_the_closed_form_where_clients_differ_in_scale_alone():
    samples = scaled([0.3, 1.0, 4.0])
    np.testing.assert_allclose(magnitude_limit(samples), isotropic_limit(samples).magnitude, rtol=1e-10, atol=1e-13)
    with pytest.raises(ValueError, match="multiple of the identity"):
        isotropic_limit(federation())


def test_a_wide_network_is_near_the_closed_form_of_both_matrices():
    samples = scaled([0.5, 2.0])
    found, limit = (
        gram_matrices(samples, init_network(60_000, SIZE, np.random.default_rng(0))),
        isotropic_limit(samples),
    )
    for ours, theirs in ((found.direction, limit.direction), (found.magnitude, limit.magnitude)):
        assert np.linalg.norm(ours - theirs) < 0.01 * np.linalg.norm(theirs)


@pytest.mark.parametrize("heterogeneity", [0.0, 2.0, 4.0])
def test_the_integral_has_converged_and_scales_of_clients_cancel(heterogeneity):
    x, _, moments = draw_inputs(2, 3, 4, heterogeneity, np.random.default_rng(5))
    owner = np.repeat([0, 1], 3)
    samples = FederatedInputs(x=x.reshape(-1, 4), client=owner, covariance=moments)
    louder = FederatedInputs(
        x=samples.x * np.array([1.0, 1e3])[owner][:, None],
        client=owner,
        covariance=moments * np.array([1.0, 1e6])[:, None, None],
    )
    fine = magnitude_limit(samples, 141)
    np.testing.assert_allclose(magnitude_limit(samples), fine, rtol=0, atol=1e-11 * fine.max())
    np.testing.assert_allclose(magnitude_limit(louder), magnitude_limit(samples), rtol=1e-11)


@pytest.mark.parametrize("samples", [federation(), scaled([0.5, 2.0])], ids=["any covariance", "isotropic"])
def test_a_million_sampled_neurons_agree_with_the_integral(samples):
    """Agree to 1e-2 relative in norm and of each entry's scale, and within sampling error."""
    limit = magnitude_limit(samples)
    found, error = monte_carlo(samples, 1_000_000, np.random.default_rng(2))
    assert np.linalg.norm(found - limit) < 1e-2 * np.linalg.norm(limit)
    scale = np.sqrt(np.outer(np.diag(limit), np.diag(limit)))
    assert np.abs((found - limit) / scale).max() < 1e-2
    scores = (found - limit) / error
    assert 0.5 < np.sqrt(np.mean(scores**2)) < 1.6
    assert np.abs(scores).max() < 5


def test_the_standard_error_is_that_of_many_repetitions():
    samples = scaled([0.5, 2.0])
    runs = [monte_carlo(samples, 2500, np.random.default_rng(seed)) for seed in range(60)]
    spread = np.std([mean for mean, _ in runs], axis=0, ddof=1)
    told = np.mean([error for _, error in runs], axis=0)
    assert np.median(spread / told) == pytest.approx(1, abs=0.1)


def test_without_the_length_below_parallel_inputs_of_two_clients_are_singular_whatever_their_covariances():
    """Appendix B.2 proves lemma 4.3 for relu(v.x), equation 7's expectation has relu(v.x) / |v|_S."""
    rng = np.random.default_rng(0)
    x, _, moments = draw_inputs(2, 3, 4, 2.0, rng)
    x[1, 0] = 2 * x[0, 0]
    samples = FederatedInputs(x=x.reshape(-1, 4), client=np.repeat([0, 1], 3), covariance=moments)
    square = np.square(samples.x).sum(axis=1)
    _, plain = arc_cosine(samples.x @ samples.x.T, square[:, None], square)
    assert abs(smallest_eigenvalue(plain)) < 1e-12 < 1e-3 < smallest_eigenvalue(block_diagonal(samples, plain))
    assert (
        1e-3
        < smallest_eigenvalue(magnitude_limit(samples))
        < smallest_eigenvalue(block_diagonal(samples, magnitude_limit(samples)))
    )


def test_what_does_not_fit_is_refused():
    x, covariance = np.ones((2, 3)), np.eye(3)[None]
    with pytest.raises(UsageError, match=r"\[P, D\], \[P\] and \[N, D, D\]"):
        FederatedInputs(x=x, client=np.array([0, 0]), covariance=np.eye(4)[None])
    with pytest.raises(UsageError, match="numbered 0 to 0"):
        FederatedInputs(x=x, client=np.array([0, 1]), covariance=covariance)
    with pytest.raises(UsageError, match="draws=1"):
        monte_carlo(federation(), 1, np.random.default_rng(0))
