"""Selection of the named entries that clients exchange: entries, selections by module type, and scopes.

In: a module. Out: its entries, and the names of those that a selection matches. Selections use the type of the module
that owns an entry, because names mislead: ``downsample.1`` of a ResNet is a BatchNorm, and "subnet" contains "bn". Name
patterns are for exceptions; a selection that matches nothing is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from operator import or_
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from ..nn.hybrid_batch_norm import HybridBatchNorm
from ..nn.recognition import runs_as_torch
from ..nn.surgery import LEARNED, has_foreign_statistics
from ..utils.errors import UsageError

Kind = Literal["parameter", "mean", "variance", "counter", "average", "constant", "spectral", "state", "hidden"]
WHOLE: tuple[Kind, ...] = ("constant", "spectral", "state", "hidden")
"""Kinds of buffers without a mean."""
KINDS: Mapping[str, Kind] = {
    "running_mean": "mean", "global_mean": "mean", "running_var": "variance", "global_var": "variance",
    "num_batches_tracked": "counter",
}  # fmt: skip
"""Kinds of the buffers of layers that normalize."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One named entry of a model's state: a parameter or a persistent buffer, and the module that owns it.

    Args:
        name: Its name in ``state_dict``.
        owner: The module that owns it.
        from_end: Number of layers with parameters registered after the owner; 0 is the last layer, usually the
            classifier.
        kind: ``parameter``, or of a buffer: running ``mean``, ``variance`` or ``counter`` of normalization, another
            moving ``average``, a ``constant``, vectors of ``spectral`` normalization, other ``state``
            (:mod:`fedshift.core.buffers`), or ``hidden``, which is not persistent.
        in_batch_norm: Whether it belongs to a BatchNorm, torch's or another.
        moves: Whether training changes it, as far as known.

    """

    name: str
    owner: nn.Module
    from_end: int
    kind: Kind = "parameter"
    in_batch_norm: bool = False
    moves: bool = True

    @property
    def is_buffer(self) -> bool:
        """Return whether the entry is a buffer."""
        return self.kind != "parameter"

    @property
    def layer(self) -> str:
        """The type of the owner, as torch prints it."""
        return str(self.owner._get_name())  # type: ignore[no-untyped-call]


def entries(module: nn.Module, *, hidden: bool = False) -> tuple[Entry, ...]:
    """Return the entries of ``module`` in ``state_dict`` order; a tied parameter occurs once, by its first name.

    ``hidden``: whether to include buffers that are not persistent.
    """
    found: list[Entry] = []
    seen: set[int] = set()
    layer, number = module, 0
    modules = dict(module.named_modules())
    for prefix, holder in modules.items():
        # The owner of a parametrized weight is the layer, not the parametrization: a BatchNorm stays a BatchNorm.
        owner = modules[prefix.split("parametrizations.")[0].rstrip(".")] if "parametrizations." in prefix else holder
        for name, tensor in (*holder._parameters.items(), *holder._buffers.items()):
            kind: Kind = _find_kind(holder, name, tensor) if name in holder._buffers else "parameter"
            if tensor is None or id(tensor) in seen or (kind == "hidden" and not hidden):
                continue
            seen.add(id(tensor))
            if kind == "parameter" and (owner is not layer or not number):
                layer, number = owner, number + 1
            full_name = f"{prefix}.{name}" if prefix else name
            found.append(Entry(full_name, owner, max(number, 1), kind, _is_normal(owner, tensor)))
    return tuple(replace(entry, from_end=max(number, 1) - entry.from_end) for entry in found)


def _find_kind(holder: nn.Module, name: str, tensor: Tensor | None) -> Kind:
    """Return the kind of a buffer as far as its module shows it; ``constant`` where only training can."""
    if name in holder._non_persistent_buffers_set:
        return "hidden"
    if isinstance(holder, _SpectralNorm):
        return "spectral"
    known = KINDS.get(name) if isinstance(holder, LEARNED) or has_foreign_statistics(holder) else None
    ours = type(holder).__module__.startswith("fedshift.") and tensor is not None and tensor.is_floating_point()
    return known or ("average" if ours else "constant")


def _is_normal(owner: nn.Module, tensor: Tensor) -> bool:
    """Return whether an entry of ``owner`` is a BatchNorm's: torch's, or another layer with running statistics."""
    if not has_foreign_statistics(owner):
        return isinstance(owner, _BatchNorm)
    return tensor.shape in ((), owner.get_buffer("running_var").shape)


def find_classifier(entries: Iterable[Entry], source_method: str) -> nn.Linear:
    """Return a model's last layer if it is linear; otherwise raise :class:`UsageError` naming the method."""
    last = next(entry for entry in entries if entry.from_end == 0)
    if not isinstance(last.owner, nn.Linear) or not runs_as_torch(last.owner):
        raise UsageError(
            f"{source_method} needs a linear classifier as the model's last layer, which is a {last.layer}: choose "
            "a model that ends in a linear layer"
        )
    return last.owner


def name_classifier(entries: Collection[Entry], source_method: str) -> frozenset[str]:
    """Return the names of the entries of :func:`find_classifier`."""
    classifier = find_classifier(entries, source_method)
    return frozenset(entry.name for entry in entries if entry.owner is classifier)


@dataclass(frozen=True, eq=False)
class Select:
    """A predicate over entries that prints as its expression; combine with ``&``, ``|`` and ``~``."""

    matches: Callable[[Entry], bool]
    text: str
    parts: tuple[Select, ...] = ()
    operator: str = ""

    def __call__(self, entry: Entry) -> bool:
        """Return whether the entry is selected."""
        return self.matches(entry)

    def __and__(self, other: Select) -> Select:
        return Select(lambda entry: self(entry) and other(entry), f"{self.text} & {other.text}", (self, other), "&")

    def __or__(self, other: Select) -> Select:
        return Select(lambda entry: self(entry) or other(entry), f"({self.text} | {other.text})", (self, other), "|")

    def __invert__(self) -> Select:
        bare = " & " not in self.text or self.operator == "|"
        return Select(lambda entry: not self(entry), f"~{self.text}" if bare else f"~({self.text})", (self,), "~")

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Preserve the identity of constants across processes, because they are compared by identity."""
        constant = next((name for name in ("everything", "nothing", "buffers") if self is globals()[name]), None)
        return constant or (Select, (self.matches, self.text, self.parts, self.operator))

    def names(self, entries: Iterable[Entry], fate: str = "kept on the client") -> frozenset[str]:
        """Return the names of the matching entries.

        Raises :class:`UsageError` if a part of the selection matches no entry, or if an excluded selection excludes
        only entries that other parts already exclude. ``fate``: describes excluded entries in messages.
        """
        entries = tuple(entries)
        parts = self._list_conjuncts()
        for index, part in enumerate(parts):
            others = parts[:index] + parts[index + 1 :]
            if part.operator == "~" and not any(not part(e) and all(other(e) for other in others) for e in entries):
                raise UsageError(_describe_repeated(part.parts[0], others, entries, fate))
        for leaf in self._list_leaves():
            if leaf not in (everything, nothing) and not any(map(leaf, entries)):
                raise UsageError(_describe_unmatched(leaf, entries))
        return frozenset(entry.name for entry in entries if self(entry))

    def _list_conjuncts(self) -> list[Select]:
        return [each for part in self.parts for each in part._list_conjuncts()] if self.operator == "&" else [self]

    def _list_leaves(self) -> list[Select]:
        return [leaf for part in self.parts for leaf in part._list_leaves()] if self.parts else [self]


def _describe_repeated(excluded: Select, others: list[Select], entries: tuple[Entry, ...], fate: str) -> str:
    """Return the message for a selection that excludes nothing that ``others`` leave."""
    if not any(map(excluded, entries)):
        return _describe_unmatched(excluded, entries)
    if also := " and ".join(other.parts[0].text for other in others if other.operator == "~"):
        return f"{excluded.text} is {fate} twice, also by {also}: remove one of the methods"
    return f"{excluded.text} cannot be {fate}, because another part leaves it out: remove a method"


def _describe_unmatched(selection: Select, entries: tuple[Entry, ...]) -> str:
    types, hint = sorted({entry.layer for entry in entries}), ""
    named = [entry.name for entry in entries] if selection.text.startswith("'") else []
    if near := get_close_matches(selection.text.strip("'"), named, n=3, cutoff=0.3):
        hint = f"; similar names: {', '.join(near)}"
    if selection is buffers:
        hint = ", none of which keeps statistics (as BatchNorm does with track_running_stats=True)"
    return (
        f"{selection.text} matches no entry of the model, whose layers are of type {', '.join(types) or 'none'}{hint}: "
        "choose a model that has such layers, or a method that does not need them"
    )


def of_type(*types: type[nn.Module]) -> Select:
    """Select entries whose owner is an instance of one of ``types``."""
    text = f"of_type({', '.join(kind.__name__ for kind in types)})"
    return Select(lambda entry: isinstance(entry.owner, types), text)


def name_matches(pattern: str) -> Select:
    """Select entries whose whole name matches the shell pattern, for example ``name_matches("head.*")``."""
    return Select(lambda entry: fnmatchcase(entry.name, pattern), repr(pattern))


def last_layers(layers: int) -> Select:
    """Select the entries of the last ``layers`` layers with parameters, in the model's order of registration."""
    if layers < 1:
        raise UsageError(f"the last {layers} layers: give 1 or more")
    return Select(lambda entry: entry.from_end < layers, f"last({layers})")


def parse_selection(selection: str | int) -> Select:
    """Parse a selection: a number of last layers, or names and patterns joined by ``|``.

    Names are the keys of :data:`SELECTIONS` and ``last``; example: ``"batch_norm|head.*"``.
    """
    if isinstance(selection, int):
        return last_layers(selection)
    parts = [part.strip() for part in selection.split("|")]
    if not all(parts):
        raise UsageError(
            f"selection {selection!r}: write {', '.join(SELECTIONS)}, last or a pattern such as head.*, joined by |"
        )
    chosen = [last_layers(1) if part == "last" else SELECTIONS.get(part) or name_matches(part) for part in parts]
    return reduce(or_, chosen)


everything = Select(lambda _: True, "everything")
nothing = Select(lambda _: False, "nothing")
buffers = Select(lambda entry: entry.is_buffer, "buffers")
batch_norm = Select(lambda entry: entry.in_batch_norm, "batch_norm")
"""Weight, bias and statistics of every BatchNorm: torch's layers, and what a network passes to ``F.batch_norm``."""
norm_layers = Select(lambda entry: entry.in_batch_norm or isinstance(entry.owner, LEARNED), "norm_layers")
"""Entries of every normalization layer: BatchNorm, InstanceNorm, GroupNorm, LayerNorm, RMSNorm, HybridBatchNorm."""
norm_statistics = replace(batch_norm & buffers, text="norm_statistics")
"""Running mean, running variance and batch counter of every BatchNorm layer."""
hybrid_factors = replace(of_type(HybridBatchNorm) & name_matches("*factor"), text="hybrid_factors")
"""The factors of every HybridBatchNorm layer, which weigh batch statistics against running statistics."""
SELECTIONS: Mapping[str, Select] = {
    "batch_norm": batch_norm, "norm_layers": norm_layers, "norm_statistics": norm_statistics,
    "batch_norm_affine": batch_norm & ~buffers,
}  # fmt: skip
"""Selections by name, for options of methods."""


@dataclass(frozen=True)
class Scope:
    """Entries that a client loads from the server at the start of a round (``load``) and uploads at its end (``send``).

    ``begin``: entries that the client sends, and loads only at the start of its first round.
    """

    load: Select = everything
    send: Select = everything
    begin: Select = nothing

    def keep_on_client(self, selection: Select) -> Scope:
        """Return the scope with ``selection`` kept on the client: neither loaded nor sent."""
        return replace(self, load=self.load & ~selection, send=self.send & ~selection)
