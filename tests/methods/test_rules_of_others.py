"""Six methods as a stranger would write them, composed with ours, on every engine and across machines."""

import ast
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path

import pytest
import torch

from fedshift.core.kernel import client_final, client_init, init_client, init_server
from fedshift.core.method import Method
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.rule import Declared, Folded, Rule
from fedshift.core.step import client_step_
from fedshift.core.work import Work
from fedshift.methods.apfl import apfl
from fedshift.methods.ditto import ditto
from fedshift.methods.fedbn import fedbn
from fedshift.methods.scaffold import scaffold
from fedshift.utils.errors import UsageError
from tests.flower.conftest import machine  # noqa: F401 - a fixture
from tests.flower.sites import Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for
from tests.laws.course import make_trial
from tests.methods import others, plain
from tests.methods.plain import advance

BASES = {"fedavg": Method, "ditto": ditto, "scaffold": scaffold, "fedbn": fedbn}
OTHERS = ("clipped", "small_features", "layer_mixes", "clusters", "styles", "mixup")
REFUSED = {
    ("clusters", "ditto"): "both define the client's model: remove one of the two",
    ("clusters", "scaffold"): "SCAFFOLD's control variate holds only if every step updates every parameter",
}
PAIRS = [(name, base) for name in OTHERS for base in BASES]
RUNNING = [pair for pair in PAIRS if pair not in REFUSED]
KNOWN = {}


def made(pair):
    name, base = pair
    return getattr(others, name)(BASES[base]())


def run(pair, engine):
    """Two rounds of the laws' unequal clients in float64."""
    running = make_trial(made(pair), engine)
    advance(running, rounds=2)
    running.close()
    return running.to_tensors()[0]


def test_each_takes_less_than_25_lines_of_code():
    source = Path(others.__file__).read_text()
    lines = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            words = ast.get_docstring(node)
            code = [line for line in source.splitlines()[node.lineno - 1 : node.end_lineno] if line.strip()]
            lines[node.name] = len(code) - bool(words)
    assert len(lines) == 2 * len(OTHERS)
    assert max(lines.values()) < 25


@pytest.mark.parametrize("pair", REFUSED, ids="+".join)
def test_what_cannot_go_together_is_refused_for_its_reason(pair):
    with pytest.raises(UsageError, match=REFUSED[pair]):
        plain.trial(made(pair))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ["stacked", "pool", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", RUNNING, ids="+".join)
def test_every_engine_equals_the_loop(pair, engine):
    if pair not in KNOWN:
        KNOWN[pair] = run(pair, "sequential")
    found, expected = run(pair, engine), KNOWN[pair]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (expected[name].double() - tensor.double()).abs().max() <= 1e-9, name


@pytest.mark.parametrize("pair", RUNNING, ids="+".join)
def test_what_it_computes_is_not_what_its_base_computes(pair):
    own, base = plain.trial(made(pair)), plain.trial(BASES[pair[1]]())
    advance(own, base, rounds=2)
    assert not all(torch.equal(own.server.shared[name], tensor) for name, tensor in base.server.shared.items())


def test_a_misspelled_hook_is_refused():
    with pytest.raises(UsageError, match=r"Wrong.gradient\(\) is not a hook, .* did you mean gradients"):
        type("Wrong", (Rule,), {"gradient": lambda self, grads, step: grads})


def test_a_rule_without_an_init_is_a_frozen_dataclass_with_or_without_a_decorator():
    class Plain(Rule):
        mu: float

    @dataclass(frozen=True, kw_only=True)
    class Decorated(Plain):
        nu: float = field(default=1.0, repr=False)

    class Own(Rule):
        def __init__(self, mu):
            self.mu = mu

    assert (Plain(0.1), replace(Plain(0.1), mu=0.2)) == (Plain(mu=0.1), Plain(0.2))
    assert repr(Decorated(mu=0.1)).endswith("Decorated(mu=0.1)")
    assert Own(0.1).mu == 0.1
    for rule in (Plain(0.1), Decorated(mu=0.1)):
        with pytest.raises(FrozenInstanceError):
            rule.mu = 0.2


@pytest.mark.parametrize("name", OTHERS)
def test_the_identity_engine_refuses_them_in_words(name):
    with pytest.raises(UsageError, match=r"needs a method that only averages complete models, which .* does not"):
        make_trial(made((name, "fedavg")), "identity", work=Work(batch_size=8, batches=1)).advance()


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "pair",
    [
        ("clipped", "ditto"),
        ("small_features", "scaffold"),
        ("layer_mixes", "fedbn"),
        ("clusters", "fedbn"),
        ("mixup", "fedbn"),
        *(("styles", base) for base in BASES if base != "fedavg"),
    ],
    ids="+".join,
)
def test_sites_compute_what_one_process_does(pair, tmp_path):
    own = f"tests.methods.others:{pair[0]}"
    spec = spec_for(f"{own}+{pair[1]}", samples=16, evaluate_every=2, moments="loaded,trained")
    grid = SiteGrid(sites_of(spec, tmp_path, code=frozenset({own})))
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")


@pytest.mark.parametrize("base", [Method, ditto, apfl], ids=lambda base: base.__name__)
def test_the_shared_model_is_clipped_to_the_limit_beside_models_of_clients(base):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).double()
    x, y = 20 * torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 3
    moved = []
    for method in (base(), others.clipped(base(), limit=0.5)):
        plan = prepare(method, network, optimizer=SGD(lr=1.0))
        job = client_init(plan, init_client(plan), init_server(plan), planned_steps=1)
        _, update = client_final(plan, client_step_(plan, job, x, y, torch.tensor(0))[0])
        changes = [update.shared[name] - plan.initial[name] for name in sorted(plan.trained)]
        moved.append(float(torch.stack([change.norm() for change in changes]).norm()))
    assert moved[0] > 1
    assert moved[1] == pytest.approx(0.5, abs=1e-12)


def test_a_second_estimator_and_kept_state_that_a_fold_drops_are_refused():
    combine = {"combine_samples": lambda self, samples, key: {}}
    first, second = (type(name, (Rule,), combine)() for name in ("First", "Second"))
    with pytest.raises(UsageError, match="First and Second both combine the gradients of samples: remove one"):
        make_trial(Method(rules=(first, second)))
    hooks = {
        "bind": lambda self, network: Declared(self, kept={"n": network.initial["head.bias"][0]}),
        "fold": lambda self, server: Folded(server.memory),
    }
    with pytest.raises(UsageError, match=r"Forgets declares 'n' as kept, but its fold\(\) drops it"):
        make_trial(Method(rules=(type("Forgets", (Rule,), hooks)(),)))
