"""Tapes: the same bits as the function, whatever it does to its own copies; and what cannot be a tape."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.engines.tape import Factors, Tape, Untraceable

K, B, INPUTS, OUTPUTS = 3, 4, 6, 5


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lane_gradients(weight_KOI, x_KBI, y_KB):
    """Gradients and losses of linear lanes: what the stacked engine records."""
    leaf = weight_KOI.detach().requires_grad_()
    loss_K = torch.vmap(lambda w, x, y: F.cross_entropy(F.linear(x, w).relu(), y))(leaf, x_KBI, y_KB)
    (grad,) = torch.autograd.grad(loss_K.sum(), (leaf,))
    return [grad, loss_K.detach()]


def lane_inputs(seed):
    return [
        draw(K, OUTPUTS, INPUTS, seed=seed),
        draw(K, B, INPUTS, seed=seed + 1),
        torch.arange(K * B).reshape(K, B) % 5,
    ]


def test_a_tape_gives_the_functions_bits_on_other_values():
    tape = Tape(lane_gradients, lane_inputs(0))
    for seed in (0, 10, 20):
        inputs = lane_inputs(seed)
        for expected, found in zip(lane_gradients(*inputs), tape(*inputs), strict=True):
            assert torch.equal(expected, found)


def test_a_gradient_that_is_a_product_is_given_as_its_factors():
    tape = Tape(lane_gradients, lane_inputs(0), factored=True)
    inputs = lane_inputs(10)
    grad, _ = tape(*inputs)
    assert isinstance(grad, Factors)
    assert grad.left.shape == (K, OUTPUTS, B)
    assert grad.right.shape == (K, B, INPUTS)
    expected = lane_gradients(*inputs)[0]
    assert (grad.left @ grad.right - expected).abs().max() <= 1e-15
    weights = inputs[0].clone()
    assert (weights.baddbmm_(*grad, alpha=-0.1) - (inputs[0] - 0.1 * expected)).abs().max() <= 1e-15


def test_statistics_that_a_layer_writes_are_those_of_the_functions_own_copy():
    layer = nn.BatchNorm1d(INPUTS).double()

    def run(x_BI, mean_I, var_I):
        mean_I, var_I = mean_I.clone(), var_I.clone()
        made = F.batch_norm(x_BI, mean_I, var_I, layer.weight.detach(), layer.bias.detach(), training=True)
        return [made, mean_I, var_I]

    inputs = [draw(B, INPUTS), torch.zeros(INPUTS).double(), torch.ones(INPUTS).double()]
    tape = Tape(run, inputs)
    others = [draw(B, INPUTS, seed=5), inputs[1], inputs[2]]
    for _ in range(2):  # the second time from the same start
        for expected, found in zip(run(*others), tape(*others), strict=True):
            assert torch.equal(expected, found)
    assert inputs[1].eq(0).all()


def test_a_copy_that_is_written_to_stays_a_copy():
    def run(x):
        once = x * 1  # no change of values, but memory that the next line writes to
        once.add_(1)
        return [once, x + 0]

    tape = Tape(run, [torch.zeros(3)])
    given = torch.full((3,), 5.0)
    once, same = tape(given)
    assert torch.equal(once, torch.full((3,), 6.0))
    assert torch.equal(same, given)
    assert torch.equal(given, torch.full((3,), 5.0))


def test_tensors_in_lists_and_several_results_are_kept_apart():
    def run(x, y):
        low, high = torch.stack([x, y]).unbind(0)
        least, places = torch.cat([low, high]).sort(descending=True)
        return [least, places, high]

    tape = Tape(run, [draw(4), draw(4, seed=1)])
    others = draw(4, seed=2), draw(4, seed=3)
    for expected, found in zip(run(*others), tape(*others), strict=True):
        assert torch.equal(expected, found)


def test_a_result_that_is_an_argument_or_a_constant_is_returned():
    constant = torch.ones(2)
    tape = Tape(lambda x, y: [y, constant, x.detach()], [torch.zeros(2), torch.zeros(3)])
    x, y = torch.full((2,), 2.0), torch.full((3,), 3.0)
    found = tape(x, y)
    assert found[0] is y
    assert found[1] is constant
    assert torch.equal(found[2], x)


def test_a_function_that_looks_at_values_is_no_tape():
    with pytest.raises(Untraceable, match="returns a Python value"):
        Tape(lambda x: [x * 2 if x.sum().item() > 0 else x], [torch.ones(2)])


def test_constants_are_made_once_unless_they_are_drawn_written_to_or_returned():
    def run(x):
        ones, filled, drawn = torch.ones(3), torch.zeros(3), torch.rand(3)
        filled.add_(x)
        return [x + ones * 2, filled, torch.ones(3), x + drawn]

    tape = Tape(run, [torch.zeros(3)])
    assert tape.operations.count("aten.mul.Tensor") == 0  # all of it is a constant
    assert [tape.operations.count(f"aten.{name}.default") for name in ("ones", "zeros", "rand")] == [1, 1, 1]
    for value in (1.0, 2.0):
        made = tape(torch.full((3,), value))
        assert torch.equal(made[0], torch.full((3,), value + 2))
        assert torch.equal(made[1], torch.full((3,), value))
        made[2].mul_(0)
    assert torch.equal(tape(torch.zeros(3))[2], torch.ones(3))
