"""Networks of torchvision, timm, MONAI, smp and HuggingFace under methods that change or select normalization.

Each network has random weights; nothing is downloaded.
For each network and method it is checked that

* surgery by identical layers leaves outputs and entries what they were;
* ``gn``, ``ln``, ``fedwon`` and ``hbn`` lose no activation, nor any other layer or parameter beside normalization and
  convolutions, and give the outputs of the unchanged network whose operations are exchanged as it runs
  (``tests/nn/operations.py``);
* a round of two unequal clients ends, with each engine, in the loop's state: ``pool`` bit for bit, ``stacked`` within
  rounding of float64;
* clients send what the method declares: all but layers with running statistics under ``fedbn``, all but these
  statistics under ``silobn``, else everything; what is not sent differs between clients afterwards, what is sent moves,
  and statistics that are frozen do not;

or that the method or the engine refuses the network in words.

``make zoo`` makes a virtual environment with the versions in ``benchmarks/zoo.txt``, prints a line for each network and
method, and writes the page docs/zoo.md; the exit code is 1 where a check fails. ``python benchmarks/zoo.py RECORDS``
keeps the results of each network in the directory RECORDS and checks those that it lacks; after RECORDS, names of
networks limit what is checked. To add a network, add a row to ``NETWORKS``.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedshift.config.expressions import list_catalog  # noqa: E402
from fedshift.core.kernel import init_client, init_server, personal_state  # noqa: E402
from fedshift.core.method import Method  # noqa: E402
from fedshift.core.optimizer import SGD  # noqa: E402
from fedshift.core.plan import Plan  # noqa: E402
from fedshift.core.preparation import apply_surgery  # noqa: E402
from fedshift.core.server_round import server_round  # noqa: E402
from fedshift.core.work import Work  # noqa: E402
from fedshift.data.assembly import federation  # noqa: E402
from fedshift.data.federation import Federation, count_labels  # noqa: E402
from fedshift.engines import ENGINES  # noqa: E402
from fedshift.engines.engine import Diverged  # noqa: E402
from fedshift.engines.spread import Pool  # noqa: E402
from fedshift.experiments.settings import Settings, make_plan  # noqa: E402
from fedshift.models import MODELS, make_network  # noqa: E402
from fedshift.nn.hybrid_batch_norm import HybridBatchNorm  # noqa: E402
from fedshift.nn.surgery import replace_layers  # noqa: E402
from fedshift.utils.errors import UsageError  # noqa: E402
from fedshift.utils.execution.workers import Workers  # noqa: E402
from fedshift.utils.state import State, clone, is_equal  # noqa: E402
from fedshift.utils.user_code import describe_error  # noqa: E402
from tests.nn.operations import Exchanged  # noqa: E402

PAGE = ROOT / "docs" / "zoo.md"
SMALL, MIDDLE = (3, 32, 32), (3, 64, 64)
BERT = "hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50"
VIT = "hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8"
DYN = "kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2), norm_name='batch', filters=(4, 8, 8)"
SWIN = "feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8)"
NETWORKS: Mapping[str, tuple[int, ...]] = {
    "torchvision:resnet18": SMALL,
    "torchvision:resnet50": SMALL,
    "torchvision:efficientnet_b0": SMALL,
    "torchvision:mobilenet_v3_small": SMALL,
    "torchvision:densenet121": SMALL,
    "torchvision:shufflenet_v2_x0_5": SMALL,
    "torchvision:convnext_tiny": SMALL,
    "torchvision:vit_b_16(image_size=32)": SMALL,
    "torchvision:swin_t": SMALL,
    "torchvision:regnet_y_400mf": SMALL,
    "torchvision:inception_v3(aux_logits=False, init_weights=False)": (3, 75, 75),
    "torchvision:googlenet": MIDDLE,
    "torchvision:googlenet(aux_logits=False, init_weights=False)": SMALL,
    "timm:resnet18": SMALL,
    "timm:efficientnet_b0": SMALL,
    "timm:mobilenetv3_small_100": SMALL,
    "timm:densenet121": SMALL,
    "timm:convnextv2_atto": SMALL,
    "timm:nf_resnet26": SMALL,
    "timm:resnetv2_50x1_bit": SMALL,
    "timm:skresnet18": SMALL,
    "timm:vit_tiny_patch16_224(img_size=32)": SMALL,
    "monai:UNet(channels=(4, 8), strides=(2,), norm='batch')": (1, 16, 16),
    "monai:UNet(channels=(4, 8), strides=(2,), num_res_units=1)": (1, 8, 16, 16),
    "monai:SegResNet(init_filters=8)": (1, 16, 16),
    "monai:SegResNet(init_filters=8, norm='batch')": (1, 8, 16, 16),
    f"monai:DynUNet({DYN})": (1, 16, 16),
    f"monai:SwinUNETR({SWIN})": (1, 64, 64),
    "smp:Unet(encoder_name='resnet18')": MIDDLE,
    "smp:DeepLabV3Plus(encoder_name='resnet18')": MIDDLE,
    "hf:resnet(embedding_size=8, hidden_sizes=(8, 16), depths=(1, 1))": SMALL,
    f"hf:vit({VIT})": SMALL,
    "hf:convnext(hidden_sizes=(8, 16), depths=(1, 1), num_stages=2)": SMALL,
    f"hf:bert({BERT})": (6,),
}
"""The shape of a sample by network."""
PACKAGES = "torch", "torchvision", "timm", "monai", "segmentation_models_pytorch", "transformers"
DENSE, TOKENS, CLASSES = ("monai", "smp"), 50, 3
"""Libraries whose networks give a class for each pixel; number of tokens; number of classes."""
METHODS = ("fedavg", "fedbn", "silobn", "fixbn", "gn", "ln", "fedwon", "hbn")
SURGERY = ("gn", "ln", "fedwon", "hbn")
ENGINES_COMPARED = ("sequential", "pool", "stacked")
ROUNDS = {"fixbn": 2}
"""Rounds of methods that need more than one."""
RATES = {"fixbn": 1e-4}
"""Rates other than 0.01: statistics that are frozen after one round fit badly."""
SIZES = {"a": 6, "b": 3}
"""Training samples of the clients, who take batches of 3."""
CLOSE = 1e-9
"""Largest difference of outputs in float64, relative to the largest output."""
MOST = 0.1
"""Change by rounding, relative to the largest value, from which on engines are not compared."""
CHANGED = 1e-13
"""Part by which inputs are changed to find what rounding does to the entries after the rounds."""
OTHERS = (nn.modules.conv._ConvNd, nn.Sequential)
"""Layers that surgery may exchange or add, beside normalization."""


class Moment(NamedTuple):
    """The end of a round: the entries that clients sent, and each client's model."""

    sent: set[str]
    models: dict[str, State]


class WrongError(Exception):
    """A check failed."""


def make_torchvision(name: str, _: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """Return a network of torchvision."""
    network: nn.Module = import_module("torchvision.models").get_model(name, num_classes=classes, **options)
    return network


def make_monai(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """Return a network of MONAI."""
    kind = getattr(import_module("monai.networks.nets"), name)
    network: nn.Module = kind(spatial_dims=len(shape) - 1, in_channels=shape[0], out_channels=classes, **options)
    return network


def make_smp(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """Return a network of segmentation_models_pytorch."""
    kind = getattr(import_module("segmentation_models_pytorch"), name)
    network: nn.Module = kind(encoder_weights=None, in_channels=shape[0], classes=classes, **options)
    return network


def find_factory(expression: str) -> Callable[[tuple[int, ...], int], nn.Module]:
    """Return the function of a network's name: a function above, or the catalog's."""
    library, _, call = expression.partition(":")
    own = {"torchvision": make_torchvision, "monai": make_monai, "smp": make_smp}.get(library)
    name, _, options = call.partition("(")
    return partial(own, name, **eval(f"dict({options or ')'}")) if own else MODELS.parse(expression)


def make(expression: str) -> nn.Module:
    """Return the network, in float64 and evaluation, with weights and statistics that normalization shows in."""
    torch.manual_seed(0)
    network = make_network(find_factory(expression), NETWORKS[expression], CLASSES, "float64").eval()
    for parameter in network.parameters():
        if parameter.ndim > 1 and not parameter.any():  # a classifier of zeros would show nothing
            parameter.data.normal_(std=0.02)
    for layer in filter(is_normalization, network.modules()):
        for entry in ("weight", "bias", "running_mean", "running_var"):
            if isinstance(tensor := getattr(layer, entry, None), torch.Tensor):
                tensor.data.uniform_(0.5, 1.5) if entry.endswith(("weight", "var")) else tensor.data.normal_(std=0.1)
    return network


def draw(shape: tuple[int, ...], samples: int, seed: int) -> np.ndarray:
    """Return tokens, or numbers whose mean depends on the seed."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, TOKENS, (samples, *shape)) if len(shape) == 1 else rng.normal(seed, 1, (samples, *shape))


def is_normalization(layer: nn.Module) -> bool:
    """Return whether a layer normalizes, by the name that its library gave it."""
    names = {kind.__name__ for kind in type(layer).__mro__}
    return any("Norm" in name and "Activation" not in name for name in names)


def count_layers(network: nn.Module) -> Counter[str]:
    """Return how often each other type occurs."""
    kept = (x for x in network.modules() if not isinstance(x, OTHERS) and not is_normalization(x))
    return Counter(type(layer).__name__ for layer in kept if type(layer) is not nn.Identity)


def list_entries(network: nn.Module) -> Counter[tuple[int, ...]]:
    """Return how often each shape occurs among the parameters of layers that do not normalize."""
    own = {id(x): x for layer in network.modules() if not is_normalization(layer) for x in layer._parameters.values()}
    return Counter(tuple(each.shape) for each in own.values() if each is not None)


@torch.no_grad()
def compare(made: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise WrongError if the outputs are not the expected."""
    gap = float((made(x) - expected).abs().max() / expected.abs().max())
    if not gap <= CLOSE:
        raise WrongError(f"outputs differ by {gap:.1e}")


@torch.no_grad()
def check_identity(network: nn.Module, x: torch.Tensor) -> None:
    """Exchange each normalization that is understood for an equal one, and compare outputs and entries."""

    def exchange(layer: _BatchNorm) -> nn.Module:
        same = nn.BatchNorm3d(layer.num_features, layer.eps, affine=layer.affine).double()
        same._check_input_dim = lambda _: None  # type: ignore[method-assign]
        same._parameters.update(layer._parameters)
        same._buffers.update(layer._buffers)
        return same

    expected = network(x)
    surgery = partial(replace_layers, kinds=(_BatchNorm,), what="the same", make=exchange)
    changed = apply_surgery(Method(surgery=(surgery,)), network).eval()
    if count_layers(network) != count_layers(changed):
        raise WrongError("identical layers change the count of others")
    if sum(p.numel() for p in network.parameters()) != sum(p.numel() for p in changed.parameters()):
        raise WrongError("identical layers change the number of parameters")
    compare(changed, x, expected)


def check_surgery(name: str, network: nn.Module, x: torch.Tensor) -> None:
    """Raise WrongError if a part is lost, or outputs are not those under exchanged operations."""
    catalog = list_catalog("methods")
    method = catalog["fedwon"](None, init="keep") if name == "fedwon" else catalog[name](None)
    changed = apply_surgery(method, network).eval()
    if lost := count_layers(network) - count_layers(changed):
        raise WrongError(f"lost {dict(lost)}")
    if lost := list_entries(network) - list_entries(changed):
        raise WrongError(f"lost parameters {dict(lost)}")
    with torch.no_grad(), Exchanged(name):
        expected = network(x)
    compare(changed, x, expected)


def make_data(expression: str, changed: float = 0.0) -> Federation:
    """Return unequal clients; ``changed``: part of their size by which random numbers change inputs."""
    shape, dense, clients = NETWORKS[expression], expression.startswith(DENSE), {}
    for seed, (client, size) in enumerate(SIZES.items()):
        rng = np.random.default_rng(seed)
        y = rng.integers(0, CLASSES, (2 * size, *shape[1:])) if dense else np.arange(2 * size) % CLASSES
        x = draw(shape, 2 * size, seed)
        x = x * (1 + changed * rng.normal(size=x.shape)) if changed and x.dtype.kind == "f" else x
        clients[client] = (x[:size], y[:size], x[size:], y[size:])
    return federation(clients, task="segmentation" if dense else "classification").check()


def prepare_plan(name: str, network: nn.Module, data: Federation) -> Plan:
    """Return the plan of the method."""
    settings = Settings(
        rounds=ROUNDS.get(name, 1),
        work=Work(batch_size=3, epochs=1),
        optimizer=SGD(lr=RATES.get(name, 0.01)),
        precision="float64",
    ).for_task(data.task)
    return make_plan(
        list_catalog("methods")[name](None), lambda *_: copy.deepcopy(network), settings, 0, classes=data.classes,
        sample=data.clients[0].train.inputs(slice(0, 1)), labels=count_labels(data), clients=len(SIZES), task=data.task,
    )  # fmt: skip


def train(name: str, plan: Plan, data: Federation, engine: str, workers: Workers) -> list[Moment]:
    """Return what each round ends with; raise UsageError if the engine refuses the plan."""
    train = {client.name: client.train for client in data.clients}
    kind, given = ENGINES[engine], (plan, train, 0)
    running = Pool(*given, executor=workers) if kind is Pool else kind(*given)
    server, clients = init_server(plan), {client: init_client(plan) for client in SIZES}
    moments = []
    for _ in range(ROUNDS.get(name, 1)):
        done = dict(running.train(server, clients))
        clients = {client: done[client].client for client in SIZES}
        server = server_round(plan, server, {client: done[client].update for client in SIZES}, SIZES)
        sent = set().union(*(each.update.shared for each in done.values()))
        models = {client: clone(personal_state(plan, state, server)) for client, state in clients.items()}
        moments.append(Moment(sent=sent, models=models))
    running.close()
    return moments


def check_scope(name: str, plan: Plan, moments: list[Moment]) -> None:
    """Raise WrongError if other entries are sent, kept, moved or frozen than the method says."""
    module, initial = plan.module, plan.initial
    layers = [(f"{at}." if at else "", layer) for at, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    own = {at + entry for at, layer in layers for entry in layer.state_dict()} & initial.keys()
    statistics = {entry for entry in own if entry.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    kept = {"fedbn": own, "silobn": statistics}.get(name, set())
    factors = {f"{at}.factor" for at, layer in module.named_modules() if isinstance(layer, HybridBatchNorm)}
    if name in ("gn", "ln", "fedwon") and own:
        raise WrongError(f"{len(own)} entries of BatchNorm remain")
    for moment in moments:
        if moment.sent != initial.keys() - kept:
            raise WrongError(f"sends {len(moment.sent)} entries, not {len(initial) - len(kept)}")
    a, b = moments[-1].models.values()
    differing = {entry for entry in initial if not torch.equal(a[entry], b[entry])}
    if more := differing - kept - factors:
        raise WrongError(f"{len(more)} entries that are sent differ between clients")
    means = {entry for entry in initial if entry.endswith("running_mean")}
    if equal := (means & kept) - differing:
        raise WrongError(f"{len(equal)} means that clients keep are equal")
    if still := {entry for entry in means if torch.equal(a[entry], initial[entry])}:
        raise WrongError(f"{len(still)} running means do not move, such as {min(still)}")
    first, last = (moment.models["a"] for moment in (moments[0], moments[-1]))
    if moved := [entry for entry in statistics if name == "fixbn" and not torch.equal(first[entry], last[entry])]:
        raise WrongError(f"{len(moved)} frozen statistics moved")


def find_gap(moment: Moment, expected: Moment) -> float:
    """Return the largest difference of an entry of a client, relative to the largest value in it or 1."""
    gaps = [0.0]
    for client, state in expected.models.items():
        for entry, tensor in state.items():
            if tensor.numel():
                gap = (moment.models[client][entry].double() - tensor.double()).abs().max()
                gaps.append(float((gap / tensor.double().abs().max().clamp(min=1)).nan_to_num(nan=torch.inf)))
    return max(gaps)


def judge(check: Callable[[], None]) -> tuple[str, str]:
    """Return works, refused or WRONG, and the words of the refusal or of what is wrong."""
    try:
        check()
    except UsageError as refusal:
        return "refused", str(refusal)
    except WrongError as wrong:
        return "WRONG", str(wrong)
    except Diverged as error:
        return "diverged", str(error)
    except Exception as error:
        return "WRONG", describe_error(error)
    return "works", ""


class Rounds:
    """The rounds of a method with each engine; UsageError if the method refuses the network."""

    def __init__(self, name: str, expression: str, network: nn.Module, workers: Workers) -> None:
        self.name, self.data, self.workers = name, make_data(expression), workers
        self.changed = make_data(expression, CHANGED)
        self.plan = prepare_plan(name, network, self.data)

    @cached_property
    def loop(self) -> list[Moment]:
        """The rounds of the sequential engine."""
        return train(self.name, self.plan, self.data, "sequential", self.workers)

    @cached_property
    def tolerance(self) -> float:
        """The difference that rounding may make: normalization of few values enlarges it."""
        return find_gap(train(self.name, self.plan, self.changed, "sequential", self.workers)[-1], self.loop[-1])

    def check(self, engine: str) -> None:
        """Raise WrongError if scope or state are wrong."""
        if engine == "sequential":
            return check_scope(self.name, self.plan, self.loop)
        (moment, expected) = train(self.name, self.plan, self.data, engine, self.workers)[-1], self.loop[-1]
        if engine == "pool":
            if not all(is_equal(state, expected.models[client]) for client, state in moment.models.items()):
                raise WrongError("other bits than the loop's")
        elif (gap := find_gap(moment, expected)) > CLOSE and self.tolerance > MOST:
            raise Diverged(f"rounding alone changes entries by {self.tolerance:.1e} of their size: nothing to compare")
        elif gap > CLOSE and gap > self.tolerance:
            raise WrongError(f"differs from the loop by {gap:.1e}, rounding by {self.tolerance:.1e}")
        return None


def check_network(expression: str, workers: Workers) -> Iterator[tuple[str, str, str, str]]:
    """Yield method, engine, verdict and words."""
    x, network = torch.from_numpy(draw(NETWORKS[expression], 2, 1)), make(expression)
    same = judge(lambda: check_identity(network, x))
    for name in METHODS:
        rounds = list[Rounds]()
        whole = same if same[0] == "WRONG" else judge(partial(start, rounds, name, expression, network, workers, x))
        for engine in ENGINES_COMPARED:
            yield name, engine, *(judge(partial(rounds[0].check, engine)) if rounds else whole)


def start(
    rounds: list[Rounds], name: str, expression: str, network: nn.Module, workers: Workers, x: torch.Tensor
) -> None:
    """Append the rounds if the method takes the network and its surgery is right."""
    made = Rounds(name, expression, network, workers)
    if name in SURGERY:
        check_surgery(name, network, x)
    rounds.append(made)


SPECIFIC = re.compile(r"(?<=of type )[^:]+|(?<=cannot run )\S+|(?<=entries by )\S+|(?<=^method )(?:'[^']*'|\"[^\"]*\")")
"""Parts of refusals that differ between networks and methods."""


def describe_cell(found: Mapping[str, tuple[str, str]], words: dict[str, int]) -> str:
    """Return the verdicts on a network under a method, by engine, with the numbers of their words."""
    told: dict[str, list[str]] = {}
    for engine, (verdict, said) in found.items():
        general = SPECIFIC.sub("...", said)
        number = f" ({words.setdefault(general, len(words) + 1)})" if said else ""
        told.setdefault(verdict + number, []).append(engine)
    if len(told) == 1:
        return next(iter(told))
    return ", ".join(each if each == "works" else f"{' and '.join(engines)} {each}" for each, engines in told.items())


TEXT = """# Networks of libraries

Which networks work with which methods: timm's and HuggingFace's by their names in `--model`, the others by [a
function](guide.md#networks-of-libraries). `make zoo` writes this page, here with {versions}.

{total}: {counts}.

**works**: with identical layers in place of its normalization the network gives the same outputs. Surgery loses no
activation, no parameter beside normalization, and no other layer, and its outputs are those of the unchanged network
whose operations are exchanged as it runs. After a round of two unequal clients, `pool` ends in the loop's state bit for
bit, and `stacked` as close as rounding allows in float64. Clients send what the method declares; statistics travel,
stay or freeze as it declares.

**refused**: before training, in the words of that number below ("...": a name, a list or a number). An engine is
named where it alone refuses; `auto` then takes another.

**diverged**: from these random weights, losses become NaN, or inputs that differ by rounding end in states that
are too different to compare.

**WRONG**: a check failed.

Weights are random, and inputs as small as the network takes.

{table}

## Words

{words}
"""


def write_page(records: Mapping[str, list[list[str]]], versions: str) -> None:
    """Write the page, and print the count of verdicts."""
    words: dict[str, int] = {}
    lines = [f"| network | sample | {' | '.join(METHODS)} |", f"|---|---|{'---|' * len(METHODS)}"]
    for expression, rows in records.items():
        cells = []
        for name in METHODS:
            found = {engine: (verdict, said) for method, engine, verdict, said in rows if method == name}
            cells.append(describe_cell(found, words))
        lines.append(f"| `{expression}` | {' x '.join(map(str, NETWORKS[expression]))} | {' | '.join(cells)} |")
    verdicts = Counter(verdict for rows in records.values() for _, _, verdict, _ in rows)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("works", "refused", "diverged", "WRONG"))
    total = f"{len(records)} networks x {len(METHODS)} methods x {len(ENGINES_COMPARED)} engines"
    said = "\n".join(f"{number}. {each}" for each, number in words.items())
    text = TEXT.format(versions=versions, total=total, counts=counts, table="\n".join(lines), words=said)
    PAGE.write_text(text, encoding="utf-8")
    print(f"{total}: {counts}")


def main() -> None:
    """Check what the records lack; print a line for each network, method and engine; write the page."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(NETWORKS)
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")  # the libraries' own
    torch.set_num_threads(1)
    files = {name: folder / (re.sub(r"\W+", "-", name) + ".json") for name in NETWORKS}
    with closing(Workers(({}, {}))) as workers:
        for name in (each for each in names if not files[each].exists()):
            rows = []
            for row in check_network(name, workers):
                rows.append(row)
                print(f"{name:40} {' '.join(f'{each:10}' for each in row)}".rstrip(), flush=True)
            files[name].write_text(json.dumps(rows, indent=1), encoding="utf-8")
    records = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}
    write_page(records, ", ".join(f"{package} {version(package)}" for package in PACKAGES))
    wrong = sum(verdict == "WRONG" for rows in records.values() for _, _, verdict, _ in rows)
    sys.exit(f"{wrong} checks failed" if wrong else 0)


if __name__ == "__main__":
    main()
