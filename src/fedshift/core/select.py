"""Which named entries of a model travel: entries, selections by module type, and scopes.

Selection goes by the TYPE of the module that owns an entry. Names mislead: "bn" is not in ``downsample.1`` of a ResNet
and is in "subnet". Name patterns are for exceptions only, and a selection that matches nothing is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..base.errors import UsageError


@dataclass(frozen=True, eq=False)
class Entry:
    """One named entry of a model's state: a parameter or a persistent buffer, and the module that owns it."""

    name: str
    owner: nn.Module
    is_buffer: bool


def entries(module: nn.Module) -> tuple[Entry, ...]:
    """The entries of ``module`` in the order of its ``state_dict``; a tied parameter stands once, by its first name."""
    found: list[Entry] = []
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        named = [(name, p, False) for name, p in owner._parameters.items()]
        hidden = owner._non_persistent_buffers_set
        named += [(name, b, True) for name, b in owner._buffers.items() if name not in hidden]
        for name, tensor, is_buffer in named:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found.append(Entry(dot + name, owner, is_buffer))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Select:
    """A predicate over entries that knows how it is written; combine with ``&``, ``|`` and ``~``."""

    matches: Callable[[Entry], bool]
    text: str
    parts: tuple[Select, ...] = ()

    def __call__(self, entry: Entry) -> bool:
        """Whether the entry is selected."""
        return self.matches(entry)

    def __and__(self, other: Select) -> Select:
        return Select(lambda entry: self(entry) and other(entry), f"{self.text} & {other.text}", (self, other))

    def __or__(self, other: Select) -> Select:
        return Select(lambda entry: self(entry) or other(entry), f"({self.text} | {other.text})", (self, other))

    def __invert__(self) -> Select:
        return Select(lambda entry: not self(entry), f"~{self.text}" if not self.parts else f"~({self.text})", (self,))

    def __repr__(self) -> str:
        return self.text

    def claims(self) -> Iterable[Select]:
        """What must match something: each named selection, and each combination that is taken away as a whole."""
        if not self.parts or len(self.parts) == 1:
            yield from self.parts or (self,)
        for part in self.parts:
            yield from part.claims()

    def names(self, found: Iterable[Entry]) -> frozenset[str]:
        """Names of the matching entries; :class:`UsageError` where a part of the selection matches no entry at all."""
        found = tuple(found)
        for claim in self.claims():
            if claim not in (everything, nothing) and not any(map(claim, found)):
                raise UsageError(_unmatched(claim, found))
        return frozenset(entry.name for entry in found if self(entry))


def _unmatched(claim: Select, found: tuple[Entry, ...]) -> str:
    types = sorted({type(entry.owner).__name__ for entry in found})
    near = get_close_matches(claim.text.strip("'"), [entry.name for entry in found], n=3, cutoff=0.3)
    hint = f"; near it are {', '.join(near)}" if near else ""
    return (
        f"{claim.text} matches no entry of the model, whose layers are of type {', '.join(types) or 'none'}{hint}: "
        "choose a model that has such layers, or a method that does not need them"
    )


def of_type(*types: type[nn.Module], text: str | None = None) -> Select:
    """Entries whose owner is an instance of one of ``types``."""
    label = text or f"of_type({', '.join(kind.__name__ for kind in types)})"
    return Select(lambda entry: isinstance(entry.owner, types), label)


def named(pattern: str) -> Select:
    """Entries whose whole name matches the shell pattern, for example ``named("head.*")``."""
    return Select(lambda entry: fnmatchcase(entry.name, pattern), repr(pattern))


everything = Select(lambda _: True, "everything")
nothing = Select(lambda _: False, "nothing")
buffers = Select(lambda entry: entry.is_buffer, "buffers")
batch_norm = of_type(_BatchNorm, text="batch_norm")
"""Weight, bias and statistics of every BatchNorm layer (1d, 2d, 3d, synchronized), whatever its name."""
norm_layers = of_type(
    _BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, text="norm_layers"
)
"""Entries of every normalization layer: BatchNorm, InstanceNorm, GroupNorm, LayerNorm, RMSNorm."""
norm_statistics = batch_norm & buffers
"""Running mean, running variance and batch counter of every BatchNorm layer."""


@dataclass(frozen=True)
class Scope:
    """What a client takes from the server at the start of a round (``load``) and uploads at its end (``send``)."""

    load: Select = everything
    send: Select = everything

    def without(self, selection: Select) -> Scope:
        """The same scope with ``selection`` kept on the client: neither loaded nor sent."""
        return Scope(load=self.load & ~selection, send=self.send & ~selection)
