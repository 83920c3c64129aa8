"""`examples/theory.py`: its equations against loops, autograd, sampling and the kernel; its statements; the page."""

import copy
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call, jacrev

from fedshift.core.kernel import client_final, client_init, init_client, init_server, personal_state
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.server_round import server_round
from fedshift.core.step import client_step_
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.models.mlp import two_layer

ROOT = Path(__file__).parents[1]
SPEC = spec_from_file_location("theory", ROOT / "examples" / "theory.py")
theory = module_from_spec(SPEC)
SPEC.loader.exec_module(theory)
CLIENTS, COUNT, SIZE, STEPS, LR = 3, 5, 4, 8, 0.4
TARGETS = np.random.default_rng(1).uniform(-1, 1, CLIENTS * COUNT)


def make_inputs(heterogeneity=2.0):
    return theory.measure_inputs(theory.draw_inputs(CLIENTS, COUNT, SIZE, heterogeneity, np.random.default_rng(0))[0])


def make_scaled(*deviations):
    """Clients whose covariances are multiples of the identity."""
    rng, owner = np.random.default_rng(0), np.repeat(np.arange(len(deviations)), COUNT)
    x = rng.normal(size=(len(owner), SIZE)) * np.array(deviations)[owner][:, None]
    return theory.FederatedInputs(x, owner, np.square(deviations)[:, None, None] * np.eye(SIZE))


def make_trained(local, width=6):
    """Return a network that differs from an initial one: gammas differ by client, and c are not signs."""
    rng = np.random.default_rng(1)
    gamma = rng.uniform(0.5, 2, (CLIENTS, width) if local else width)
    return theory.Network(rng.normal(size=(width, SIZE)), gamma, rng.normal(size=width))


@pytest.mark.parametrize("local", [False, True])
def test_gram_matrices_are_equations_6_to_9_term_by_term(local):
    inputs, network = make_inputs(), make_trained(local)
    direction, magnitude = np.zeros((2, CLIENTS * COUNT, CLIENTS * COUNT))
    for p, q in np.ndindex(direction.shape):
        for k, (v, c) in enumerate(zip(network.v, network.c, strict=True)):
            norms, slopes, aside, hidden = [], [], [], []
            for sample in (p, q):
                x, client = inputs.x[sample], inputs.client[sample]
                s = inputs.moments[client]
                norms.append(np.sqrt(v @ s @ v))
                slopes.append((network.gamma[client, k] if local else network.gamma[k]) * (v @ x >= 0))
                aside.append((np.eye(SIZE) - np.outer(s @ v, v) / (v @ s @ v)) @ x)
                hidden.append(max(v @ x, 0))
            below = norms[0] * norms[1] * len(network.c)
            direction[p, q] += c**2 * slopes[0] * slopes[1] * (aside[0] @ aside[1]) / below
            together = not local or inputs.client[p] == inputs.client[q]
            magnitude[p, q] += c**2 * hidden[0] * hidden[1] * together / below
    for ours, theirs in zip(theory.gram_matrices(inputs, network), (direction, magnitude), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("local", [False, True])
def test_lambda_is_the_square_of_the_jacobian_that_autograd_finds_of_the_network_itself(local):
    torch.manual_seed(0)
    inputs, model = make_inputs(), two_layer((SIZE,), 1, width=40, alpha=1.7).double()
    model.norm.eps = 0.0
    v, c = model.hidden.weight.detach(), model.top.weight[0] * 40**0.5
    gamma = model.norm.weight.detach() * torch.linspace(0.5, 1.5, CLIENTS, dtype=torch.float64)[:, None]
    gamma = gamma if local else gamma[0]
    x = torch.from_numpy(inputs.x).view(CLIENTS, COUNT, SIZE)

    def predict(v, gamma):
        outputs = []
        for client in range(CLIENTS):
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            state |= {"hidden.weight": v, "norm.weight": gamma[client] if local else gamma}
            outputs.append(functional_call(model, state, (x[client],))[:, 0])
        return torch.cat(outputs)

    by_v, by_gamma = (jacobian.flatten(1).numpy() for jacobian in jacrev(predict, argnums=(0, 1))(v, gamma))
    network = theory.Network(v.numpy(), gamma.numpy(), c.numpy(force=True))
    np.testing.assert_allclose(theory.compute_outputs(inputs, network), predict(v, gamma), rtol=0, atol=1e-12)
    direction, magnitude = theory.gram_matrices(inputs, network)
    np.testing.assert_allclose(direction, by_v @ by_v.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(magnitude, by_gamma @ by_gamma.T, rtol=0, atol=1e-12)


def test_alpha_cancels_from_both_matrices_at_the_start():
    inputs = make_inputs()
    ours, wide = (
        theory.gram_matrices(inputs, theory.init_network(64, SIZE, np.random.default_rng(3), alpha))
        for alpha in (1.0, 7.0)
    )
    np.testing.assert_allclose(49 * wide[0], ours[0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(wide[1], ours[1], rtol=1e-10, atol=1e-12)


def test_arc_cosine_kernels_at_known_angles():
    both, magnitude = theory.arc_cosine(np.array([4.0, 0.0, -4.0, 2.0]), np.full(4, 4.0), np.full(4, 4.0))
    np.testing.assert_allclose(both, [1 / 2, 1 / 4, 0, 1 / 3], atol=1e-15)
    sixty = (np.sqrt(3) / 2 + np.pi / 3) / (2 * np.pi)
    np.testing.assert_allclose(magnitude, [2, 2 / np.pi, 0, 4 * sixty], atol=1e-15)


def test_the_integral_is_the_closed_form_where_clients_differ_in_scale_only():
    inputs = make_scaled(0.3, 1.0, 4.0)
    expected = theory.isotropic_limit(inputs)[1]
    np.testing.assert_allclose(theory.magnitude_limit(inputs), expected, rtol=1e-10, atol=1e-13)
    with pytest.raises(ValueError, match="multiple of the identity"):
        theory.isotropic_limit(make_inputs())


def test_a_wide_network_is_near_the_closed_form_of_both_matrices():
    inputs = make_scaled(0.5, 2.0)
    wide = theory.gram_matrices(inputs, theory.init_network(60_000, SIZE, np.random.default_rng(0)))
    for ours, limit in zip(wide, theory.isotropic_limit(inputs), strict=True):
        assert np.linalg.norm(ours - limit) < 0.01 * np.linalg.norm(limit)


@pytest.mark.parametrize("heterogeneity", [0.0, 2.0, 4.0])
def test_the_integral_has_converged_and_scales_of_clients_cancel(heterogeneity):
    x, _, moments = theory.draw_inputs(2, 3, 4, heterogeneity, np.random.default_rng(5))
    owner, scales = np.repeat([0, 1], 3), np.array([1.0, 1e3])
    limit, fine = (
        theory.magnitude_limit(theory.FederatedInputs(x.reshape(-1, 4), owner, moments), nodes) for nodes in (61, 141)
    )
    np.testing.assert_allclose(limit, fine, rtol=0, atol=1e-11 * fine.max())
    louder = (x * scales[:, None, None]).reshape(-1, 4), owner, moments * scales[:, None, None] ** 2
    np.testing.assert_allclose(theory.magnitude_limit(theory.FederatedInputs(*louder)), limit, rtol=1e-11)


@pytest.mark.parametrize("inputs", [make_inputs(), make_scaled(0.5, 2.0)], ids=["any covariance", "isotropic"])
def test_two_hundred_thousand_sampled_neurons_agree_with_the_integral(inputs):
    """Equation 7 as it is: the mean over v ~ N(0, I) of relu(v.x) relu(v.y) / (|v|_S |v|_T), within sampling error."""
    v = np.random.default_rng(2).normal(size=(200_000, SIZE))
    norm = np.sqrt(np.stack([((v @ s) * v).sum(axis=1) for s in inputs.moments])[inputs.client])
    hidden = np.maximum(inputs.x @ v.T, 0) / norm
    mean, square = hidden @ hidden.T / len(v), hidden**2 @ (hidden**2).T / len(v)
    scores = (mean - theory.magnitude_limit(inputs)) / np.sqrt((square - mean**2) / len(v))
    assert 0.5 < np.sqrt(np.mean(scores**2)) < 1.6
    assert np.abs(scores).max() < 5


def test_without_the_length_below_parallel_inputs_of_two_clients_are_singular_whatever_their_covariances():
    """Appendix B.2 proves lemma 4.3 for relu(v.x), equation 7's expectation has relu(v.x) / |v|_S."""
    x, _, moments = theory.draw_inputs(2, 3, 4, 2.0, np.random.default_rng(0))
    x[1, 0] = 2 * x[0, 0]
    inputs = theory.FederatedInputs(x.reshape(-1, 4), np.repeat([0, 1], 3), moments)
    square = np.square(inputs.x).sum(axis=1)
    _, plain = theory.arc_cosine(inputs.x @ inputs.x.T, square[:, None], square)
    full, local = theory.smallest_eigenvalues(inputs, plain)
    assert abs(full) < 1e-12 < 1e-3 < local
    full, local = theory.smallest_eigenvalues(inputs, theory.magnitude_limit(inputs))
    assert 1e-3 < full < local


@pytest.mark.slow
def test_corollary_4_6_holds_on_300_federations_and_for_algorithm_1_of_all_of_lambda():
    pairs = theory.try_corollary(300, 2.0, 0)
    limit, joint, run = (pairs[:, number] for number in range(3))
    assert pairs.shape == (300, 3, 2)
    assert (limit[:, 1] >= limit[:, 0] - 1e-12).all()
    assert (run[:, 1] >= run[:, 0] - 1e-12).all()
    assert (joint[:, 1] < joint[:, 0] - 1e-12).any()  # the paper does not claim this
    assert (limit > 0).all()
    assert np.median(limit[:, 1] / limit[:, 0]) > 1.5


@pytest.mark.parametrize("seed", range(3))
def test_lemma_4_3_and_its_cases_where_the_assumption_fails(seed):
    cases = theory.try_lemma(seed)
    assert {name: tuple(abs(least) < 1e-12 for least in leasts) for name, leasts in cases.items()} == {
        "no two inputs parallel": (False, False),
        "x and 2x on one client": (True, True),
        "x and 2x on two clients, S proportional": (True, False),
        "x and 2x on two clients, S of other shape": (False, False),
        "x and -x on one client": (False, False),
        "5 pairs x and -x on one client": (True, True),
    }
    assert min(min(leasts) for leasts in cases.values()) > -1e-12


def test_fedavgs_eigenvalue_vanishes_as_two_clients_inputs_close_and_fedbns_does_not():
    full, local, different = theory.close_angle(0, theory.ANGLES).T
    assert full[-1] < 1e-7 < 1e-3 < min(local[-1], different[-1])
    slope = np.polyfit(np.log(theory.ANGLES[-6:]), np.log(full[-6:]), 1)[0]
    assert slope == pytest.approx(2, abs=0.1)  # as the square of the angle


def test_drawn_inputs_have_the_drawn_covariances():
    x, content, moments = theory.draw_inputs(3, 8000, 3, 3.0, np.random.default_rng(0))
    values = np.linalg.eigvalsh(moments)
    assert np.exp(-3) < values.min() < values.max() < np.exp(3)
    assert (values.max(axis=1) / values.min(axis=1)).max() > 10
    for client, measured in enumerate(theory.measure_inputs(x).moments):
        assert np.linalg.norm(measured - moments[client]) < 0.1 * np.linalg.norm(moments[client])
    np.testing.assert_allclose(np.einsum("nmd,nme->nde", content, content) / 8000, [np.eye(3)] * 3, atol=0.1)


@pytest.mark.parametrize("local", [False, True])
def test_a_step_follows_the_jacobian(local):
    inputs, network = make_inputs(), make_trained(local)
    residual = theory.compute_outputs(inputs, network) - TARGETS
    by_v, by_gamma = theory.compute_jacobians(inputs, network)
    after = theory.descent_step(inputs, network, residual, 0.01, weight=2.0)
    np.testing.assert_allclose(after.v, network.v - 0.01 * np.einsum("pkd,p->kd", by_v, residual), atol=1e-14)
    pulls = by_gamma * residual[:, None]
    moved = np.stack([pulls[inputs.client == n].sum(0) for n in range(CLIENTS)]) if local else pulls.sum(0)
    np.testing.assert_allclose(after.gamma, network.gamma - 0.02 * moved, atol=1e-14)
    np.testing.assert_array_equal(after.c, network.c)


def federate(method, model, inputs):
    """Residuals before each round and after the last: E = 1, full batches, mean squared error, in float64."""
    plan = prepare(
        method, model, optimizer=SGD(lr=LR), precision="float64", loss=lambda f, y: (f[:, 0] - y).square().mean()
    )
    x, y = torch.from_numpy(inputs.x).view(CLIENTS, COUNT, SIZE), torch.from_numpy(TARGETS).view(CLIENTS, COUNT)
    server, clients = init_server(plan), {str(client): init_client(plan) for client in range(CLIENTS)}
    residuals = []
    for number in range(STEPS + 1):
        before, updates = [], {}
        for name in clients:
            net = copy.deepcopy(model)
            net.load_state_dict(personal_state(plan, clients[name], server))
            mine, target = x[int(name)], y[int(name)]
            before.append(net.train()(mine)[:, 0].detach() - target)
            job, _ = client_step_(plan, client_init(plan, clients[name], server), mine, target, torch.tensor(number))
            clients[name], updates[name] = client_final(plan, job)
        residuals.append(torch.cat(before).numpy())
        server = server_round(plan, server, updates, dict.fromkeys(clients, COUNT))
    return np.stack(residuals)


@pytest.mark.parametrize(("method", "weight"), [(fedavg(), 1), (fedbn(), CLIENTS)], ids=["fedavg", "fedbn"])
def test_rounds_of_the_kernel_are_gradient_descent_and_fedbn_steps_gamma_once_for_each_client(method, weight):
    torch.manual_seed(0)
    model = two_layer((SIZE,), 1, width=30, alpha=1.5).double()
    model.norm.eps = 0.0
    inputs = make_inputs(heterogeneity=1.5)
    v, gamma = model.hidden.weight.numpy(force=True).copy(), model.norm.weight.numpy(force=True).copy()
    gamma = np.tile(gamma, (CLIENTS, 1)) if weight > 1 else gamma
    network = theory.Network(v, gamma, model.top.weight[0].numpy(force=True) * 30**0.5)
    rounds = federate(method, model, inputs)
    rate = 2 * LR / len(TARGETS)
    measured = theory.descend(inputs, network, TARGETS, rate, STEPS, weight)
    np.testing.assert_allclose(measured, rounds, rtol=0, atol=1e-12)
    other = theory.descend(inputs, network, TARGETS, rate, STEPS, CLIENTS + 1 - weight)
    assert np.abs(other - rounds).max() > 1e-2


def test_the_prediction_is_repeated_multiplication():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 5))
    evolution, residual = root @ root.T, rng.normal(size=5)
    for row in theory.predict_residuals(evolution, residual, rate=0.05, steps=6):
        np.testing.assert_allclose(row, residual, atol=1e-12)
        residual = residual - 0.05 * evolution @ residual


def train(width, alpha, steps):
    inputs, start = make_inputs(heterogeneity=1.5), theory.init_network(width, SIZE, np.random.default_rng(4), alpha)
    return theory.train_methods(inputs, TARGETS, start, steps)


def test_wider_networks_follow_the_prediction_more_closely():
    narrow, wide = (train(width, 3.0, 30) for width in (30, 6000))
    for method in theory.METHODS:
        assert theory.largest_gap(narrow[method]) > 5 * theory.largest_gap(wide[method])
        assert theory.largest_gap(wide[method]) < 0.01


def test_convergence_is_linear_within_the_bound_and_every_eigenvalue_of_fedbn_is_at_least_fedavgs():
    courses = train(1000, 10.0, 100)
    for course in courses.values():
        share, least = theory.share_of_start(course.measured), np.linalg.eigvalsh(course.evolution)[0]
        assert share == pytest.approx(
            [row @ row / (course.measured[0] @ course.measured[0]) for row in course.measured]
        )
        assert (share <= (1 - course.rate * least / 2) ** np.arange(101)).all()
        assert (np.diff(share) < 0).all()
    full, joint, run = (courses[method].evolution for method in theory.METHODS)
    assert {1 / course.rate for course in courses.values()} == {
        max(np.linalg.eigvalsh(run)[-1], np.linalg.eigvalsh(full)[-1])
    }
    assert (np.linalg.eigvalsh(run) >= np.linalg.eigvalsh(full)).all()
    assert theory.smallest_eigenvalue(run - full) > -1e-12
    assert np.linalg.eigvalsh(joint)[-1] < np.linalg.eigvalsh(full)[-1]


def call_main(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["theory.py", *words.split()])
    theory.main()
    return capsys.readouterr().out


def test_the_script_prints_every_table(monkeypatch, capsys):
    words = "--clients 2 --samples 4 --dimension 4 --width 64 --steps 10 --draws 2"
    printed = call_main(words, monkeypatch, capsys)
    assert re.search(r"G_inf \(the corollary\) +0 ", printed)
    assert re.search(r"x and 2x on two clients, S proportional +0 +0\.\d", printed)
    assert printed.count("kept") == 3


@pytest.mark.parametrize("words", ["--clients 1", "--width 15", "--alpha 0", "--heterogeneity nan", "--seed -1"])
def test_an_option_out_of_range_is_refused(words, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call_main(words, monkeypatch, capsys)
    assert re.search(rf"{words}.*: must be from", capsys.readouterr().err)


@pytest.mark.slow
def test_every_number_of_the_pages_tables_is_printed(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "theory.md").read_text()
    printed = set(re.findall(r"[\d.e-]+", call_main(f"--picture {tmp_path / 'theory.svg'}", monkeypatch, capsys)))
    assert "<svg" in (tmp_path / "theory.svg").read_text()
    rows = re.findall(r"^\|.*\d.*\|$", page, re.MULTILINE)
    cells = {number for row in rows for cell in row.split("|")[2:] for number in re.findall(r"\d[\d.e-]*", cell)}
    assert len(cells) > 60
    assert cells <= printed
