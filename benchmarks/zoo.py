"""Networks of timm and torchvision under every method that changes or selects normalization: kept, or refused.

For each network and method it is checked that

* ``gn``, ``ln``, ``nonorm``, ``fedwon`` and ``hbn`` lose no activation, nor any other layer beside normalization and
  convolutions, and give the outputs of the unchanged network whose operations are exchanged as it runs
  (``tests/nn/operations.py``), in float64;
* ``fedbn`` keeps exactly the entries of layers with running statistics, ``silobn`` their statistics;
* under ``fixbn`` with frozen statistics, no normalization uses those of the batch;

or that the method refuses the network in words. Weights are random, of seed 0. ``make zoo`` makes a virtual environment
with the versions in ``benchmarks/zoo.txt`` and prints the table, about three minutes on one core; the exit code is 1
where a check fails. To add a network, add a row to ``NETWORKS``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedshift.config.expressions import list_catalog  # noqa: E402
from fedshift.core.optimizer import SGD  # noqa: E402
from fedshift.core.plan import compute_outputs  # noqa: E402
from fedshift.core.preparation import apply_surgery, prepare  # noqa: E402
from fedshift.nn.dropout import dropout_key  # noqa: E402
from fedshift.utils.errors import UsageError  # noqa: E402
from tests.nn.operations import Exchanged  # noqa: E402

NETWORKS = (
    "timm:densenet121", "timm:efficientnet_b0", "timm:resnet18", "timm:mobilenetv3_small_100", "timm:nf_resnet26",
    "timm:resnetv2_50x1_bit", "timm:tf_efficientnet_b0", "timm:convnext_atto", "torchvision:resnet18",
    "torchvision:efficientnet_b0", "torchvision:densenet121", "torchvision:mobilenet_v3_small",
)  # fmt: skip
METHODS = ("gn", "ln", "nonorm", "fedwon", "hbn", "fixbn", "fedbn", "silobn")
SURGERY = METHODS[:5]
SIZE, CLASSES = 64, 5
CLOSE = 1e-9
"""Largest difference of outputs, relative to the largest output."""
OTHERS = (nn.modules.conv._ConvNd, nn.Sequential)
"""Layers that surgery may exchange or add, beside normalization."""


def make_network(name: str) -> nn.Module:
    """Return the network, in float64 and evaluation, with weights and statistics that normalization shows in."""
    library, _, model = name.partition(":")
    torch.manual_seed(0)
    if library == "timm":
        network = import_module("timm").create_model(model, pretrained=False, num_classes=CLASSES)
    else:
        network = import_module("torchvision.models").get_model(model, weights=None, num_classes=CLASSES)
    for layer in network.modules():
        for entry in ("weight", "bias", "running_mean", "running_var"):
            if is_normalization(layer) and isinstance(tensor := getattr(layer, entry, None), torch.Tensor):
                tensor.data.uniform_(0.5, 1.5) if entry.endswith(("weight", "var")) else tensor.data.normal_(std=0.1)
    return network.double().eval()


def is_normalization(layer: nn.Module) -> bool:
    """Return whether a layer normalizes, by the name that its library gave it."""
    names = {kind.__name__ for kind in type(layer).__mro__}
    return any("Norm" in name and "Activation" not in name for name in names)


def count_layers(network: nn.Module) -> Counter[str]:
    """Return how often each other type occurs."""
    kept = (x for x in network.modules() if not isinstance(x, OTHERS) and not is_normalization(x))
    return Counter(type(layer).__name__ for layer in kept if type(layer) is not nn.Identity)


def check_surgery(name: str, network: nn.Module, x: torch.Tensor) -> str:
    """Return what is wrong, or an empty text."""
    catalog = list_catalog("methods")
    method = catalog["fedwon"](None, init="keep") if name == "fedwon" else catalog[name](None)
    changed = apply_surgery(method, network).eval()
    if lost := count_layers(network) - count_layers(changed):
        return f"lost {dict(lost)}"
    with torch.no_grad():
        made = changed(x)
        with Exchanged(name):
            expected = network(x)
    gap = float((made - expected).abs().max() / expected.abs().max())
    if not gap <= CLOSE:
        return f"outputs differ by {gap:.1e}"
    prepare(method, network, optimizer=SGD(lr=0.1), sample=x[:1])
    return ""


def check_selection(name: str, network: nn.Module, x: torch.Tensor) -> str:
    """Return what is wrong, or an empty text."""
    plan = prepare(list_catalog("methods")[name](None), network, optimizer=SGD(lr=0.1), sample=x[:1])
    if name == "fixbn":
        plan.set_mode(training=True, frozen=True)
        key = torch.zeros((), dtype=torch.int64)
        with torch.no_grad(), dropout_key(key), Exchanged(name) as exchanged:
            compute_outputs(plan, plan.initial, x)
        return f"{sum(exchanged.training)} layers use the batch" if any(exchanged.training) else ""
    entries = network.state_dict()
    owners = {entry.removesuffix("running_mean") for entry in entries if entry.endswith(".running_mean")}
    own = {entry for entry in entries if f"{entry.rpartition('.')[0]}." in owners}
    expected = {entry for entry in own if name == "fedbn" or "running_" in entry or entry.endswith("tracked")}
    return "" if plan.personal == expected else f"keeps {len(plan.personal)} entries, not {len(expected)}"


def check_network(network_name: str) -> Iterator[tuple[str, str, str]]:
    """Yield method, verdict (kept, refused or WRONG) and words for each method."""
    torch.manual_seed(1)
    x = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    for name in METHODS:
        network = make_network(network_name)
        try:
            wrong = (check_surgery if name in SURGERY else check_selection)(name, network, x)
        except UsageError as refusal:
            yield name, "refused", str(refusal)
        else:
            yield name, "WRONG" if wrong else "kept", wrong


def main() -> None:
    """Print a line for each network and method."""
    print(", ".join(f"{package} {version(package)}" for package in ("torch", "torchvision", "timm")))
    wrong = 0
    for network in sys.argv[1:] or NETWORKS:
        for method, verdict, words in check_network(network):
            wrong += verdict == "WRONG"
            print(f"{network:32} {method:8} {verdict:8} {words}".rstrip(), flush=True)
    sys.exit(f"{wrong} checks failed" if wrong else 0)


if __name__ == "__main__":
    main()
