"""User-supplied initial weights: state dictionaries from files, checked entry by entry and read without running code.

A ``.safetensors`` file contains only tensors. Files of ``torch.save`` are read with ``weights_only=True``, which
refuses everything but tensors and plain values, so that no file can run code. A network starts from these weights
instead of random ones. If a method changes the network first (FedWon), weights for either version are accepted.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..core.plan import Plan
from ..core.preparation import bind_rules
from ..core.selection import entries, last_layers
from ..utils.errors import Ref, Sentence, UsageError
from ..utils.files import check_archive
from ..utils.state import State
from ..utils.words import join_some

PICKLED = (".pt", ".pth", ".bin")
"""Suffixes of files that ``torch.save`` writes."""
PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that torch's wrappers (``DataParallel``, ``compile``) add to every name."""
COUNTER = ".num_batches_tracked"
"""Suffix of the names of BatchNorm's counters, which may be missing because old files lack them."""
NAMED = 4
"""Maximum number of entries that a message lists."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InitialWeights:
    """Initial entries of networks.

    Args:
        source: The file, or another description for messages.
        entries: The state dictionary.
        skip_classifier: Ignore the last layer, which then starts from random weights.

    """

    source: str
    entries: State
    skip_classifier: bool = False

    def __str__(self) -> str:
        return self.digest + " without the last layer" * self.skip_classifier

    @cached_property
    def digest(self) -> str:
        """Digest of all entries, so that a run is never continued with different ones."""
        found = blake2b(digest_size=16)
        for name, tensor in sorted(self.entries.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def find_differences(self, network: nn.Module) -> list[str]:
        """Return descriptions of the names that the network or the weights lack; empty if none."""
        skipped = self._find_skipped(network)
        own = {name: x for name, x in network.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        given = {id(tensor) for name, tensor in own.items() if name in self.entries}  # one of tied entries is enough
        missing = [
            name
            for name, tensor in own.items()
            if id(tensor) not in given and name not in skipped and not f".{name}".endswith(COUNTER)
        ]
        unexpected = [name for name in self.entries if name not in own]
        kinds = {"of its entries missing": missing, "unexpected": unexpected}
        return [
            f"{len(some)} {kind} ({join_some(map(repr, some), shown=NAMED)})" for kind, some in kinds.items() if some
        ]

    def load_into(self, network: nn.Module) -> None:
        """Load the entries into ``network``; raise :class:`UsageError` listing mismatches of shape or type."""
        own = network.state_dict()
        with torch.no_grad():
            for name, tensor in self._select(network, own).items():
                own[name].copy_(tensor)

    def load_into_plan(self, plan: Plan, differences: list[str]) -> Plan:
        """Return ``plan`` with these initial entries, which are named as in its network after the method's surgery.

        Raises :class:`UsageError` if they do not match: ``differences`` from the unchanged network, or other shapes.
        """
        if self.find_differences(plan.module):
            changed = ", neither before nor after the method's changes to it" if plan.method.surgery else ""
            raise UsageError(
                f"{self.source} does not fit the network{changed}: {'; '.join(differences)}. Name the network that "
                "these weights are of ({}), or rename their entries",
                Ref("model"),
            )
        given = {name: x.to(plan.initial[name]) for name, x in self._select(plan.module, plan.initial).items()}
        return bind_rules(replace(plan, initial={**plan.initial, **given}))

    def check_kept(self, plan: Plan) -> None:
        """Raise :class:`UsageError` if the method reinitialized loaded entries."""
        skipped = self._find_skipped(plan.module)
        for name, tensor in plan.initial.items():
            given = self.entries.get(name)
            if given is None or name in skipped or given.shape != tensor.shape or torch.equal(given.to(tensor), tensor):
                continue
            raise UsageError(
                f"method {plan.method.label!r} reinitializes {name!r}, so that {self.source} would be lost: choose an "
                "option of the method that keeps weights, such as fedwon(init='keep')"
            )

    def _find_skipped(self, network: nn.Module) -> frozenset[str]:
        return last_layers(1).names(entries(network)) if self.skip_classifier else frozenset()

    def _select(self, network: nn.Module, own: Mapping[str, Tensor]) -> State:
        """Return the entries to load; raise :class:`UsageError` listing mismatches of shape or type."""
        skipped = self._find_skipped(network)
        chosen = {name: x for name, x in self.entries.items() if name in own and name not in skipped}
        other = {name: x for name, x in chosen.items() if x.shape != own[name].shape}
        kinds = {name: x for name, x in chosen.items() if x.is_floating_point() != own[name].is_floating_point()}
        wrong = [
            f"{name!r} has shape {tuple(x.shape)} where the network has {tuple(own[name].shape)}"
            for name, x in other.items()
        ] + [f"{name!r} is of {x.dtype} where the network has {own[name].dtype}" for name, x in kinds.items()]
        if not wrong:
            return chosen
        fix = Sentence("give weights of this network for samples of this shape, or another network ({})", Ref("model"))
        last = last_layers(1).names(entries(network))
        if not kinds and other.keys() <= last:
            name = next(iter(other))
            fix = Sentence(
                f"its last layer is for {len(other[name])} classes, and the data have {len(own[name])}. Leave it out "
                "({}), so that it starts from random weights, or give data of its classes",
                Ref(weights_skip_classifier=True),
            )
        raise UsageError(f"{self.source} does not fit the network: {join_some(wrong, shown=NAMED)}: {{}}", fix)


def as_initial_weights(
    given: str | Path | Mapping[str, Any] | InitialWeights | None, *, skip_classifier: bool = False
) -> InitialWeights | None:
    """Return weights from a file or a state dictionary; None if none are given.

    Raises :class:`UsageError` for files that cannot be read without running code, and for non-numeric entries.
    """
    if isinstance(given, InitialWeights):
        return given
    if given is None:
        if skip_classifier:
            raise UsageError(
                "{} leaves a layer of weights out, but none are given ({})",
                Ref("weights_skip_classifier"),
                Ref("weights"),
            )
        return None
    if not isinstance(given, str | Path | Mapping):
        raise UsageError(f"weights is a {type(given).__name__}: give a file, or a network's state_dict()")
    source = "weights" if isinstance(given, Mapping) else str(given)
    found = _unwrap(given if isinstance(given, Mapping) else _read_file(Path(given)), source)
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UsageError(f"{source}: entry {name!r} has NaN or infinite values: give weights that did not diverge")
    return InitialWeights(source=source, entries=found, skip_classifier=skip_classifier)


def _read_file(path: Path) -> Any:
    """Return the content of a weights file; raise :class:`UsageError` if it is not one, or contains anything else."""
    if not path.is_file():
        raise UsageError(f"no weights at {path.resolve()}: give the path of a file that exists ({{}})", Ref("weights"))
    if path.suffix not in (".safetensors", *PICKLED):
        raise UsageError(
            f"{path}: a file of weights ends in .safetensors or {', '.join(PICKLED)}: write one with "
            "safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')"
        )
    try:
        if zipfile.is_zipfile(path):
            check_archive(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about formats that work or are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors, which could run code, and is not read: save the state dictionary alone "
            "(safetensors.torch.save_file(network.state_dict(), 'weights.safetensors'))"
        ) from error
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{path} cannot be read as weights ({reason}): write it again, or give another file"
        ) from error


def _unwrap(content: Any, source: str) -> State:
    """Return the one state dictionary in ``content``, at the top or under a key, without the wrappers' prefixes."""
    found = content if _is_state(content) else None
    if found is None and isinstance(content, Mapping):
        inner = [value for value in content.values() if _is_state(value)]
        found = inner[0] if len(inner) == 1 else None
    if found is None:
        keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise UsageError(
            f"{source} holds no state dictionary, names with tensors, but {keys or 'nothing'}: save "
            "only network.state_dict()"
        )
    state = {str(name): tensor.detach() for name, tensor in found.items()}
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(x, Tensor) for x in value.values())
