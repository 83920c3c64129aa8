"""Plans: a method resolved against a model.

In: a network with the roles of its entries (:mod:`~fedshift.core.network`), and rules bound to it. Out: what each step
trains, and facts about the whole that engines and reports ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import nn

from .declarations import Phase, RulePhase
from .method import Method
from .network import Loss, Network
from .optimizer import SGD
from .rule import HOOKS, Declared, Rule
from .selection import hybrid_factors
from .states import LocalTrainingState


class Updated(NamedTuple):
    """Parameters that the optimizer updates in a step, with the learning rate multiplied by ``lr_scale``.

    ``rule``: position of the rule that owns the parameters; None: they are the model's. ``decay``: whether weight decay
    applies.
    """

    names: frozenset[str]
    rule: int | None
    lr_scale: float
    decay: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Network):
    """A method resolved against one model. Created by :func:`~fedshift.core.preparation.prepare`.

    Args:
        method: The method.
        rules: The method's rules, resolved against the network; empty while they are being bound.
        loss: Computes the mean loss of a batch from outputs and labels.
        smallest_batch: Minimum batch size: 2 if the model cannot train on one sample, else 1.

    """

    method: Method
    rules: tuple[Declared, ...] = ()
    loss: Loss
    smallest_batch: int
    _updates: dict[object, tuple[Updated, ...]] = field(default_factory=dict, init=False, repr=False)
    _verdicts: dict[str, str | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def downloaded(self) -> frozenset[str]:
        """Entries that the server sends to clients: loaded in each round, or adopted in the first."""
        return self.loaded | self.adopted

    @property
    def has_global(self) -> bool:
        """Whether the server holds one complete model for all clients (with FedBN it does not)."""
        hidden = {entry.name for entry in self.entries if entry.kind == "hidden"}
        return self.sent | hidden == frozenset(self.initial) and not self.mixes

    @property
    def mixes(self) -> bool:
        """Whether clients load individual mixes of uploads."""
        return any(bound.rule.mixes for bound in self.rules)

    @property
    def personalizes(self) -> bool:
        """Whether each client has its own model, so that clients that never trained have none.

        HybridBatchNorm's factors affect only training and do not personalize the model, nor does state that the server
        has too (:mod:`fedshift.core.buffers`).
        """
        kept = (each for each in self.entries if each.name in self.personal and not hybrid_factors(each))
        keeps = any(each.kind != "hidden" and each.name not in self.adopted & self.whole for each in kept)
        adapts = self.method.finetune or any(bound.rule.personalizes for bound in self.rules)
        return keeps or self.mixes or bool(adapts)

    @cached_property
    def folds(self) -> tuple[int, ...]:
        """Positions of the rules that define ``fold``: one that aggregates first, one that moves the result last."""
        rules = [bound.rule for bound in self.rules]
        return tuple(sorted(self.defines("fold"), key=lambda index: rules[index].moves - rules[index].aggregates))

    @cached_property
    def made(self) -> frozenset[str]:
        """Entries of the server that rules compute."""
        return frozenset[str]().union(*(bound.sets for bound in self.rules))

    def defines(self, hook: str) -> tuple[int, ...]:
        """Return the positions of the rules that define ``hook``."""
        return self._defined[hook]

    @cached_property
    def _defined(self) -> dict[str, tuple[int, ...]]:
        kinds = [type(bound.rule) for bound in self.rules]
        return {
            hook: tuple(at for at, kind in enumerate(kinds) if getattr(kind, hook) is not getattr(Rule, hook))
            for hook in HOOKS
        }

    @cached_property
    def samples_before_work(self) -> int:
        """Largest number of samples that a rule sees before local work."""
        return max((bound.samples_before_work for bound in self.rules), default=0)

    @cached_property
    def estimator(self) -> Rule | None:
        """The rule that combines the gradients of samples, if any."""
        return next((self.rules[index].rule for index in self.defines("combine_samples")), None)

    @cached_property
    def draws(self) -> bool:
        """Whether a step makes random draws."""
        return self.keyed or any(bound.draws for bound in self.rules) or self.estimator is not None

    @cached_property
    def clients_differ_only_in_entries(self) -> bool:
        """Whether clients differ only in the model's entries when they start, not in the state of rules."""
        kept = any(bound.on_client or bound.server for bound in self.rules)
        acts = any(map(self.defines, ("start", "personalize", "end")))
        return not (kept or acts or self.mixes)

    @cached_property
    def is_plain_sgd(self) -> bool:
        """Whether a step only subtracts the learning rate times the objective's gradients."""
        plain = isinstance(self.optimizer, SGD) and not (self.optimizer.momentum or self.optimizer.weight_decay)
        rules_train = any(self.own_trained) or any(bound.phases for bound in self.rules)
        return plain and not self.defines("gradients") and self.estimator is None and not rules_train

    @cached_property
    def phases(self) -> dict[str, tuple[RulePhase, ...]]:
        """All phases by :attr:`Phase.when`; by default, own parameters are trained during all of the model's steps."""
        phases: dict[str, tuple[RulePhase, ...]] = {"before": (), "during": (), "after": ()}
        for index, bound in enumerate(self.rules):
            own = any(phase.trains == "own" for phase in bound.phases)
            for phase in bound.phases if own else (*bound.phases, Phase()):
                phases[phase.when] += ((index, phase),)
        return phases

    @cached_property
    def separate(self) -> frozenset[int]:
        """Positions of rules whose own parameters are trained in separate passes, where their loss runs."""
        return frozenset(index for index, phase in self.phases["before"] + self.phases["after"])

    @cached_property
    def phases_need_step_count(self) -> bool:
        """Whether the parameters trained in a step depend on the number of steps in the round."""
        return any(phase.share != (0.0, 1.0) for _, phase in self.phases["during"])

    def list_updates(self, job: LocalTrainingState) -> tuple[Updated, ...]:
        """Return the updates of the next step of ``job``, one of the model's steps or of a separate phase."""
        active = (job.separate_phase,) if job.separate_phase else self.phases["during"]
        if self.phases_need_step_count and not job.separate_phase:
            step = job.done - job.start
            active = tuple(each for each in active if each[1].covers(step, job.planned_steps))
        kind = active, job.separate_phase is None
        if kind not in self._updates:
            updates = self._list_updates(*kind)
            self._updates[kind] = tuple(each for each in updates if each.names)
        return self._updates[kind]

    def _list_updates(self, active: tuple[RulePhase, ...], model: bool) -> Iterator[Updated]:
        """Yield the parameters trained in the phases ``active``; ``model``: whether the model is trained, too."""
        phased = frozenset[str]().union(*(phase.trains for _, phase in self.phases["during"] if phase.trains != "own"))
        taken = self.trained - phased if model else frozenset[str]()
        yield Updated(taken, None, 1.0, decay=True)
        for index, phase in active:
            if phase.trains == "own":
                own, names = self.rules[index], self.rules[index].names
                network = frozenset(names[entry] for entry in own.model.keys() & self.trained)
                yield Updated(network, index, phase.lr_scale, decay=True)
                yield Updated(frozenset(names[entry] for entry in own.params), index, phase.lr_scale, decay=phase.decay)
            else:
                yield Updated((phase.trains & self.trained) - taken, None, phase.lr_scale, decay=True)
                taken |= phase.trains

    @cached_property
    def feature_layers(self) -> dict[str, nn.Module]:
        """Layers whose inputs rules read, by name of the rule."""
        readers = (bound for bound in self.rules if bound.features)
        return {bound.name: self.find_layer(bound.features, bound.rule.source_method) for bound in readers}

    @cached_property
    def own_trained(self) -> tuple[frozenset[str], ...]:
        """Names of each rule's own parameters in local training."""
        return tuple(
            frozenset(bound.names[entry] for entry in (*(bound.model.keys() & self.trained), *bound.params))
            for bound in self.rules
        )

    @property
    def rule_names(self) -> tuple[str, ...]:
        """Names of the rules, which prefix their states in checkpoints and uploads."""
        return tuple(bound.name for bound in self.rules)

    def verdict(self, engine: str, judge: Callable[[], str | None] | None = None) -> str | None:
        """Return why ``engine`` cannot run the plan, which ``judge`` finds once; None: it can, as far as known."""
        if judge and engine not in self._verdicts:
            self._verdicts[engine] = judge()
        return self._verdicts.get(engine)
