"""Linear layers by oneDNN: torch's values and gradients, and torch's own layers wherever that is not for them.

Where this machine has no such product, torch's stands in for it.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations

from fedshift.core.selection import batch_norm, entries
from fedshift.nn import linear
from fedshift.nn.linear import (
    ALONE,
    LANES,
    LEAST,
    FastLinear,
    list_products,
    make_products,
    set_products,
    use_fast_linear,
    use_torch_linear,
    vmapped_lanes,
)
from fedshift.utils.errors import UsageError

INPUTS, OUTPUTS = 256, 160
SHAPES = [(INPUTS,), (1, INPUTS), (37, INPUTS), (5, 7, INPUTS)]


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """How many products went by oneDNN, as a list of them."""
    product = linear.multiply_by_onednn if linear.is_available() else F.linear
    made = []
    monkeypatch.setattr(linear, "multiply_by_onednn", lambda x, w, b: made.append(x.shape) or product(x, w, b))
    monkeypatch.setattr(linear, "is_available", lambda: True)
    return made


def layer(bias=True, **options):
    """A linear layer with keyed weights, of torch's own class."""
    made, drawn = nn.Linear(INPUTS, OUTPUTS, bias=bias, **options), torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype) / 16
    return made


def fast(module, products=ALONE + LANES):
    """The layer ``module`` with ``products`` by oneDNN."""
    set_products(use_fast_linear(module), {"": products})
    return module


def inputs(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def assert_near(found, expected):
    """Within 1e-5 of the largest value."""
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).abs().max() <= 1e-5 * expected.double().abs().max()


def differentiated(module, x):
    """Value and gradients (inputs, parameters) of a function of the layer's outputs, and second derivatives."""
    x = x.detach().requires_grad_()
    wanted = [x, *module.parameters()]
    made = module(x)
    first = torch.autograd.grad((made * made.detach().cos()).sum() + made.square().sum(), wanted, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), wanted)
    return made, *first, *second


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_both_derivatives_are_those_of_float64(products, shape, bias):
    quick = fast(layer(bias))
    assert type(quick) is FastLinear
    for found, expected in zip(
        differentiated(quick, inputs(shape)), differentiated(layer(bias).double(), inputs(shape).double()), strict=True
    ):
        assert found.dtype == torch.float32
        assert_near(found, expected)
    assert len(products) >= 3


def test_inputs_may_lie_in_memory_as_they_like():
    plain, quick = layer(), fast(layer())
    wide = inputs((INPUTS, 12))
    for x in (wide.t(), inputs((12, 2 * INPUTS))[:, ::2], inputs((1, INPUTS)).expand(4, INPUTS)):
        assert not x.is_contiguous()
        assert_near(quick(x), plain(x))


@pytest.mark.parametrize("shape", [(3, INPUTS - 1), (3, 2 * INPUTS), (1,), ()], ids=str)
def test_inputs_of_another_shape_are_refused_in_torchs_words(shape):
    with pytest.raises(RuntimeError) as expected:
        layer()(inputs(shape))
    with pytest.raises(RuntimeError) as found:
        fast(layer())(inputs(shape))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("shape", [(0, INPUTS), (3, 0, INPUTS)], ids=str)
def test_no_samples_give_no_outputs(shape):
    quick = fast(layer())
    x = inputs(shape).requires_grad_()
    assert quick(x).shape == (*shape[:-1], OUTPUTS)
    found = torch.autograd.grad(quick(x).sum(), [x, quick.weight, quick.bias])
    assert [grad.shape for grad in found] == [x.shape, quick.weight.shape, quick.bias.shape]
    assert not any(grad.any() for grad in found)


def test_only_what_is_wanted_is_differentiated(products):
    quick = fast(layer())
    quick.weight.requires_grad_(False)
    quick.bias.requires_grad_(False)
    x = inputs((3, INPUTS)).requires_grad_()
    made = quick(x)
    products.clear()
    made.sum().backward()
    assert products == [(3, OUTPUTS)]
    assert quick.weight.grad is quick.bias.grad is None
    assert_near(x.grad, quick.weight.sum(0).expand(3, INPUTS))


def test_without_gradients_nothing_is_recorded():
    with torch.no_grad():
        made = fast(layer())(inputs((3, INPUTS)))
    assert made.grad_fn is None
    assert not made.requires_grad


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def left_alone():
    smaller = LEAST // INPUTS - 1
    return {
        "small": nn.Linear(INPUTS, smaller),
        "float64": layer(dtype=torch.float64),
        "bfloat16": layer(dtype=torch.bfloat16),
        "subclass": Scaled(INPUTS, OUTPUTS),
        "parametrized": parametrizations.weight_norm(layer()),
        "bilinear": nn.Bilinear(INPUTS, INPUTS, 2),
        "attention": nn.MultiheadAttention(INPUTS, 4, dropout=0.0),
    }


@pytest.mark.parametrize("kind", left_alone())
def test_other_layers_stay_as_they_are(kind):
    module = nn.Sequential(left_alone()[kind])
    before = [type(each) for each in module.modules()]
    assert use_fast_linear(module) is module
    assert [type(each) for each in module.modules()] == before


def test_the_least_size_counts():
    assert type(fast(nn.Linear(INPUTS, LEAST // INPUTS))) is FastLinear


def test_names_ties_and_appearance_stay():
    net = nn.Sequential(layer(), nn.ReLU(), nn.Linear(OUTPUTS, INPUTS), layer())
    net[3].weight = net[0].weight
    before, text = copy.deepcopy(net), str(net)
    assert use_fast_linear(net) is net
    assert [type(each) for each in net] == [FastLinear, nn.ReLU, FastLinear, FastLinear]
    assert net[3].weight is net[0].weight
    assert list(net.state_dict()) == list(before.state_dict())
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in before.named_parameters()]
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in net.state_dict().items())
    assert str(net) == text
    assert [entry.layer for entry in entries(net)] == ["Linear"] * 5
    with pytest.raises(UsageError, match="whose layers are of type Linear: choose"):
        batch_norm.names(entries(net))
    net.load_state_dict(before.state_dict())
    assert isinstance(net[0], nn.Linear)


def test_a_quick_layer_can_be_copied_and_stored():
    quick, x = fast(layer()), inputs((3, INPUTS))
    file = io.BytesIO()
    torch.save(quick, file)
    file.seek(0)
    for other in (copy.deepcopy(quick), torch.load(file, weights_only=False)):
        assert type(other) is FastLinear
        assert torch.equal(other(x), quick(x))


def test_torchs_own_product_inside_torch_linear(products):
    plain, quick, x = layer(), fast(layer()), inputs((3, INPUTS))
    with use_torch_linear():
        with use_torch_linear():
            pass
        assert torch.equal(quick(x), plain(x))
    assert not products
    with pytest.raises(ZeroDivisionError), use_torch_linear():
        raise ZeroDivisionError
    quick(x)
    assert products == [(3, INPUTS)]


def lanes(module):
    """Four clients' entries, stacked."""
    return {name: torch.stack([k * tensor for k in range(1, 5)]) for name, tensor in module.state_dict().items()}


def run_together(module, state, x, x_dim=0):
    return vmap(lambda entries, x: functional_call(module, entries, (x,)), in_dims=(0, x_dim))(state, x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "x_dim"), [((4, 32, INPUTS), 0), ((32, 4, INPUTS), 1), ((2, 16, INPUTS), None)])
def test_clients_side_by_side_have_the_values_and_gradients_of_float64(products, bias, shape, x_dim):
    found = {}
    for module in (fast(layer(bias)), layer(bias).double()):
        leaves = {name: each.requires_grad_() for name, each in lanes(module).items()}
        x = inputs(shape).to(module.weight.dtype).requires_grad_()
        with vmapped_lanes():
            made = run_together(module, leaves, x, x_dim)
        grads = torch.autograd.grad((made * made.detach().cos()).sum(), [x, *leaves.values()])
        found[type(module)] = [made, *grads]
    for quick, expected in zip(found[FastLinear], found[nn.Linear], strict=True):
        assert_near(quick, expected)
    assert len(products) == 3 * 4  # of each lane one forward and two backward


def test_low_precision_is_torchs(products):
    plain, quick, x = layer(), fast(layer()), inputs((3, INPUTS))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = quick(x), plain(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert not products


def test_a_layer_made_float64_afterwards_is_torchs(products):
    quick, plain = fast(layer()).double(), layer().double()
    assert torch.equal(quick(inputs((3, INPUTS)).double()), plain(inputs((3, INPUTS)).double()))
    assert not products


def test_where_there_is_no_such_product_nothing_changes(monkeypatch):
    monkeypatch.setattr(linear, "is_available", lambda: False)
    net = nn.Sequential(layer(), nn.ReLU())
    assert use_fast_linear(net) is net
    assert type(net[0]) is nn.Linear


def fails_with(error):
    def fail(*_):
        raise error

    return fail


def wrong(x, w, b):
    return F.linear(x, w, b) + 1


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (F.linear, True),
        (wrong, False),
        (fails_with(AttributeError("no operator")), False),
        (fails_with(RuntimeError("not compiled with oneDNN")), False),
        (fails_with(NotImplementedError("not on this device")), False),
        (fails_with(TypeError("other arguments")), False),
    ],
    ids=["right", "wrong", "missing", "refusing", "unsupported", "changed"],
)
def test_the_product_is_available_where_it_is_right(monkeypatch, product, expected):
    monkeypatch.undo()  # the machine's own answer is the one that is tried here
    monkeypatch.setattr(linear, "multiply_by_onednn", product)
    assert linear.is_available.__wrapped__() is expected


def test_a_layer_for_which_nothing_is_chosen_is_torchs_bit_for_bit(products):
    plain, quick, x = layer(), use_fast_linear(layer()), inputs((37, INPUTS))
    assert list_products(quick) == {"": []}
    for found, expected in zip(differentiated(quick, x), differentiated(plain, x), strict=True):
        assert torch.equal(found, expected)
    assert not products


SIDES = {"outputs": (3, INPUTS), "inputs' gradients": (3, OUTPUTS), "weights' gradients": (OUTPUTS, 3)}
"""Shape of the left factor of each product."""


@pytest.mark.parametrize("kind", ALONE)
def test_each_product_is_chosen_by_itself(products, kind):
    quick, exact = fast(layer(), [kind]), layer().double()
    assert list_products(quick) == {"": [kind]}
    found, expected = ([], [])
    for module, made in ((quick, found), (exact, expected)):
        x = inputs((3, INPUTS)).to(module.weight.dtype).requires_grad_()
        made += [module(x), *torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])]
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)
    assert set(products) == {SIDES[kind]}
    products.clear()
    differentiated(quick, inputs((3, INPUTS)))
    assert SIDES[kind] in products


@pytest.mark.parametrize("kind", LANES)
def test_each_product_of_lanes_is_chosen_by_itself(products, kind):
    found = {}
    for module in (fast(layer(), [kind]), layer().double()):
        leaves = {name: each.requires_grad_() for name, each in lanes(module).items()}
        x = inputs((4, 3, INPUTS)).to(module.weight.dtype).requires_grad_()
        with vmapped_lanes():
            made = run_together(module, leaves, x)
        found[type(module)] = made, *torch.autograd.grad(made.square().sum(), [x, *leaves.values()])
    for quick, expected in zip(found[FastLinear], found[nn.Linear], strict=True):
        assert_near(quick, expected)
    assert products == [SIDES[kind.removesuffix(" of lanes")]] * 4


def test_choices_for_layers_and_for_lanes_are_apart(products):
    alone, together = fast(layer(), ALONE), fast(layer(), LANES)
    x_KBI = inputs((4, 3, INPUTS))
    assert torch.equal(together(x_KBI), layer()(x_KBI))
    with vmapped_lanes():
        assert torch.equal(run_together(alone, lanes(alone), x_KBI), run_together(layer(), lanes(alone), x_KBI))
    assert not products


def test_lanes_are_traced_to_the_same_products(products):
    quick, x_KBI = fast(layer()), inputs((4, 32, INPUTS))
    quick.requires_grad_(False)

    def step(state, x):
        leaves = {name: each.detach().requires_grad_() for name, each in state.items()}
        with vmapped_lanes():
            made = run_together(quick, leaves, x)
        return made, *torch.autograd.grad(made.square().sum(), tuple(leaves.values()))

    graph = make_fx(step)(lanes(quick), x_KBI)
    state = {name: 3 * tensor for name, tensor in lanes(quick).items()}
    for found, expected in zip(graph(state, x_KBI), step(state, x_KBI), strict=True):
        assert torch.equal(found, expected)


def test_choices_travel_with_copies_and_stay_where_none_is_given():
    net = nn.Sequential(layer(), nn.Linear(OUTPUTS, INPUTS), nn.Linear(3, 3))
    set_products(use_fast_linear(net), {"0": [LANES[0], ALONE[1]], "2": ALONE, "missing": ALONE})
    assert list_products(net) == {"0": [ALONE[1], LANES[0]], "1": []}
    set_products(net, {"1": ALONE})
    assert list_products(copy.deepcopy(net)) == {"0": [ALONE[1], LANES[0]], "1": [*ALONE]}
    set_products(net, {"0": []})
    assert list_products(net)["0"] == []


def test_what_is_timed_are_the_same_products(products):
    works = make_products(3, INPUTS, OUTPUTS)
    assert works.keys() == {*ALONE, *LANES}
    for kind, (usual, other) in works.items():
        assert_near(other(), usual())
        assert set(products) == {SIDES[kind.removesuffix(" of lanes")]}
        products.clear()
