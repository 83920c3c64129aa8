"""Methods: compositions of orthogonal choices, whose defaults are FedAvg's.

A module in ``fedshift.methods`` defines one function that changes only what differs from its base method; the decorator
:func:`method` adds a default base and a name. Methods therefore compose: ``fedbn(fedprox(mu=0.01))``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, Self, cast, get_args

from torch import nn

from ..utils.errors import UsageError, unknown_name
from ..utils.errors import require as require
from .rule import GRADIENT_STAGES, Rule
from .selection import Scope, Select, everything, nothing
from .work import Work

Surgery = Callable[[nn.Module], nn.Module]
"""A transformation of a copy of the model, before entries are named; its repr describes it.

Surgery that replaces normalization comes first: its attribute ``replaced`` has the functions of torch that the network
must not call outside of layers. All other surgery follows by its attribute ``stage`` (default 1).
"""


Weighting = Literal["auto", "samples", "used", "uniform"]
"""Weight by training samples (FedAvg's n_k), by the samples used in the round, or equally.

The first two differ if a round is not a whole number of epochs. ``auto``: ``used`` if the local work is a number of
batches (FedMMB's Algorithm 1), otherwise ``samples``.
"""
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
CHOICES = {"finetune": "fine-tunes models for use", "work": "sets the local work", "weighting": "weighs clients"}
"""Fields that one component of a method may set, and what they do, for messages."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method; with all defaults, FedAvg.

    Args:
        name: The expression that composed the method.
        typed: The expression as the user typed it, which :attr:`label` prefers over ``name``; None: not typed.
        components: The functions that composed the method, outermost first.
        surgery: Transformations of the network, in order of :data:`Surgery`.
        scope: Entries that clients load and send.
        trains: Parameters that the federation trains, among the network's trainable parameters.
        finetune: Number of rounds of local work on all parameters that fine-tune a client's loaded model before it is
            evaluated or exported; federated training is unaffected.
        rules: Changes of local training and of persistent state, in order of application: rules that change gradients
            are last, sorted by :attr:`Rule.gradient_stage` and name.
        freeze: Number of rounds, or fraction of all rounds (a float in (0, 1)), after which BatchNorm's running
            statistics are frozen, and training normalizes with them; None: never.
        weighting: Weights of clients in an average, a :data:`Weighting`.
        pooled: Whether all data are trained on together on one machine (the centralized upper baseline); with
            ``"scaled"``, the batch size is multiplied by the number of clients.
        work: Fields of ``Work`` that override the experiment's.
        optimizer: Fields of the local optimizer that override the experiment's.

    """

    name: str = "fedavg"
    typed: str | None = field(default=None, compare=False, repr=False)
    components: tuple[Component, ...] = field(default=(), compare=False, repr=False)
    surgery: tuple[Surgery, ...] = ()
    scope: Scope = field(default_factory=Scope)
    trains: Select = everything
    finetune: int = 0
    rules: tuple[Rule, ...] = ()
    freeze: int | float | None = None
    weighting: Weighting = "auto"
    pooled: Literal[False, "same", "scaled"] = False
    work: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name in tables, folder names and messages; no computation depends on it."""
        return self.typed or self.name

    @property
    def text(self) -> str:
        """All choices in one line, which identifies the method."""
        parts: dict[str, Any] = {
            "begin with": None if self.scope.begin is nothing else self.scope.begin,
            "train": None if self.trains is everything else self.trains, "fine-tune": self.finetune,
            "surgery": self.surgery, "rules": tuple(r for r in self.rules if not (r.aggregates or r.moves)),
            "freeze": self.freeze, "server": self.stepper, "pooled": self.pooled, "work": dict(self.work),
            "optimizer": dict(self.optimizer),
        }  # fmt: skip
        return (
            f"{self.name}: load {self.scope.load}, send {self.scope.send}, "
            f"aggregate {self.aggregator or 'Mean()'} by {self.weighting}"
            + "".join(f", {name} {value}" for name, value in parts.items() if value)
        )

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise unknown_name("weighting", str(self.weighting), WEIGHTINGS)
        if self.freeze is not None and not (
            0 < self.freeze < 1 if isinstance(self.freeze, float) else self.freeze >= 0
        ):
            raise UsageError(f"switch={self.freeze}: give a number of rounds (an integer) or a fraction in (0, 1)")
        for choice, others in (
            ("replaces the aggregation", [rule for rule in self.rules if rule.aggregates]),
            ("has a server optimizer", [rule for rule in self.rules if rule.moves]),
        ):
            if len(others) > 1:
                raise UsageError(f"{self.name_source(others[0])} already {choice}; choose one of the two")
        object.__setattr__(self, "surgery", tuple(sorted(self.surgery, key=_place_surgery)))
        object.__setattr__(self, "rules", tuple(sorted(self.rules, key=_place_rule)))
        object.__setattr__(self, "optimizer", dict(sorted(self.optimizer.items())))

    @property
    def aggregator(self) -> Rule | None:
        """The rule that aggregates uploads in place of the mean, if any."""
        return next((rule for rule in self.rules if rule.aggregates), None)

    @property
    def stepper(self) -> Rule | None:
        """The rule that moves the aggregated entries, a server optimizer, if any."""
        return next((rule for rule in self.rules if rule.moves), None)

    def list_sources(self, choose: Callable[[Method], object]) -> tuple[str, ...]:
        """Return the names of the components that changed what ``choose`` returns of a method, innermost first."""
        return tuple(each.name for each in self.components[::-1] if choose(each.before) != choose(each.after))

    def name_sources(self, choose: Callable[[Method], object], otherwise: str = "another part") -> str:
        """Return :meth:`list_sources` in words, for messages; ``otherwise``: if no component made that choice."""
        return " and ".join(dict.fromkeys(self.list_sources(choose))) or otherwise

    def list_choosers(self, kind: type) -> tuple[str, ...]:
        """Return the names of the components that chose a rule of type ``kind``."""
        return self.list_sources(lambda method: [rule for rule in method.rules if type(rule) is kind])

    def name_source(self, rule: Rule) -> str:
        """Return the name of the component that last chose a rule of this type, for messages; else the rule's."""
        return (self.list_choosers(type(rule)) or (rule.source_method,))[-1]

    @property
    def norm_replacers(self) -> str:
        """Names of the components that replace normalization layers; empty: none does."""
        return self.name_sources(lambda method: list(filter(find_replaced, method.surgery)), "")

    def resolve_weighting(self, work: Work) -> Self:
        """Return the method with the weighting ``auto`` resolved under ``work``.

        Raises :class:`UsageError` if another weighting was chosen, and nothing is averaged by it.
        """
        if self.weighting == "auto":
            return replace(self, weighting="used" if work.batches is not None else "samples")
        why, rule = "", self.aggregator
        if rule:
            why = "" if rule.weighs else f"{self.name_source(rule)} weighs clients by other means"
        elif self.pooled:
            why = self.name_sources(lambda method: method.pooled) + " pools all data"
        elif self.scope.send is nothing:
            why = self.name_sources(lambda method: method.scope) + " sends nothing"
        if why:
            weighting = f"fedavg(weighting={self.weighting!r})"
            raise UsageError(f"method {self.label!r}: {weighting} has no effect, because {why}: remove one of the two")
        return self

    def weigh(self, *, samples: float, used: float) -> float:
        """Return the unnormalized weight of a client with ``samples`` training samples, ``used`` of them in the round.

        ``weighting`` must be resolved.
        """
        assert self.weighting != "auto", "resolve_weighting first"
        return {"samples": float(samples), "used": float(used), "uniform": 1.0}[self.weighting]

    def keep_on_client(self, selection: Select) -> Self:
        """Return the method with ``selection`` neither loaded nor sent."""
        return replace(self, scope=self.scope.keep_on_client(selection))

    def with_rule(self, rule: Rule) -> Self:
        """Return the method with ``rule``; raise :class:`UsageError` if two rules aggregate uploads, or move them."""
        return replace(self, rules=(*self.rules, rule))

    def with_surgery(self, *surgery: Surgery) -> Self:
        """Return the method with ``surgery`` appended to its surgery."""
        return replace(self, surgery=(*self.surgery, *surgery))

    def choose(self, **choices: Any) -> Self:
        """Return the method with other fields of :data:`CHOICES`; raise :class:`UsageError` if it already set one."""
        for name in choices:
            choose = attrgetter(name)
            if choose(self) != choose(Method()):
                source = self.name_sources(choose, self.name)
                raise UsageError(f"{source} already {CHOICES[name]}; choose one of the two")
        return replace(self, **choices)


class Component(NamedTuple):
    """A function that composed a method: its name, with the options that differ as in the method's name, and place.

    ``before``: the method that it was applied to; ``after``: the method that it returned.
    """

    name: str
    title: str
    place: int
    before: Method
    after: Method


METHOD, FOUNDATION, MODIFIER = range(3)
"""Places of titles in a name: ``fedbn+fedavg(weighting='uniform')+gn`` composes the same method in every spelling."""


def find_replaced(change: Surgery) -> tuple[Callable[..., Any], ...]:
    """Return the normalizing functions that a surgery replaces; empty if it keeps the network's normalization."""
    return getattr(change, "replaced", ())


def _place_surgery(change: Surgery) -> tuple[int, str]:
    return (-1, repr(change)) if find_replaced(change) else (getattr(change, "stage", 1), "")


def _place_rule(rule: Rule) -> tuple[int, str]:
    changes = type(rule).gradients is not Rule.gradients
    return (GRADIENT_STAGES.index(rule.gradient_stage), type(rule).__name__) if changes else (-1, "")


Options = ParamSpec("Options")


class MethodFunction(Protocol[Options]):
    """A function of options that returns a method on top of ``base`` (None: FedAvg)."""

    __name__: str

    def __call__(self, base: Method | None = None, /, *args: Options.args, **options: Options.kwargs) -> Method:
        """Return the method."""


def method(function: Callable[Concatenate[Method, Options], Method]) -> MethodFunction[Options]:
    """Turn ``function(base, *, ...)`` into a named method: ``fedbn`` on FedAvg, ``fedbn+fedprox(mu=0.1)`` on another.

    The name lists the options that differ from their defaults; ``base``, the method that is changed, becomes optional
    (FedAvg), and error messages start with the name. If the function returns its base unchanged, so does the name.
    """
    return _compose(function, METHOD)


def foundation(function: Callable[Concatenate[Method, Options], Method]) -> MethodFunction[Options]:
    """:func:`method` for FedAvg, which stands below methods in names: ``fedbn+fedavg(weighting='uniform')``."""
    return _compose(function, FOUNDATION)


def modifier(function: Callable[Concatenate[Method, Options], Method]) -> MethodFunction[Options]:
    """:func:`method` for modifiers that are not methods by themselves, which end names: ``fedavg+gn``."""
    return _compose(function, MODIFIER)


def _compose(function: Callable[Concatenate[Method, Options], Method], place: int) -> MethodFunction[Options]:
    signature = inspect.signature(function)
    first, *options = signature.parameters.values()
    reals = {each.name for each in options if each.annotation in (float, float | None, "float", "float | None")}

    @wraps(function)
    def compose(base: Method | None = None, *args: Options.args, **kwargs: Options.kwargs) -> Method:
        start = base or Method()
        real = {name: float(value) if name in reals and type(value) is int else value for name, value in kwargs.items()}
        kwargs = cast("Any", real)  # 1 and 1.0 must yield the same name, which keys random streams
        try:
            composed = function(start, *args, **kwargs)
        except UsageError as error:
            raise UsageError(f"{_name(function.__name__, place, start)}: {{}}", error) from error
        values = signature.bind(start, *args, **kwargs).arguments
        changed = {
            each.name: values[each.name] for each in options if values.get(each.name, each.default) != each.default
        }
        if composed is start:
            return composed
        component = Component(function.__name__, _title(function.__name__, changed), place, start, composed)
        return replace(
            composed,
            name=_name(component.title, place, start),
            typed=_join(component.title, place, start.typed) if start.typed else None,
            components=(component, *start.components),
        )

    optional = first.replace(default=None, annotation="Method | None")
    compose.__signature__ = signature.replace(parameters=[optional, *options], return_annotation="Method")  # type: ignore[attr-defined]
    return cast("MethodFunction[Options]", compose)


def _name(title: str, place: int, base: Method) -> str:
    """Return the expression for ``base`` with the component ``title``; equal methods have equal expressions."""
    titles = [(each.place, each.title) for each in base.components]
    if base.name != _join_titles(titles):  # its user named it
        return _join(title, place, base.name)
    return _join_titles([(place, title), *titles])


def _join_titles(titles: Iterable[tuple[int, str]]) -> str:
    ordered = sorted(titles, key=lambda each: each[0])
    if not ordered or ordered[0][0] == MODIFIER:
        ordered.insert(0, (FOUNDATION, "fedavg"))
    return "+".join(title for _, title in ordered)


def _join(title: str, place: int, base: str) -> str:
    if place != METHOD:
        return title if base == "fedavg" and place == FOUNDATION else f"{base}+{title}"
    rest = base.removeprefix("fedavg").removeprefix("+") if f"{base}+".startswith("fedavg+") else base
    return f"{title}+{rest}" if rest else title


def _title(name: str, changed: Mapping[str, Any]) -> str:
    """Return ``name`` with the changed options, as tables show it."""
    options = ", ".join(
        f"{option}={value:g}" if isinstance(value, float) and float(f"{value:g}") == value else f"{option}={value!r}"
        for option, value in changed.items()
    )
    return f"{name}({options})" if options else name
