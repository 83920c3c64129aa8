"""Rules: changes of local training and of the server, beyond averaging.

A rule declares its state, trained parameters, reads and uploads in :meth:`Rule.bind`, and acts in the other hooks,
which do nothing by default. A method holds a tuple of rules, at most one per type; each hook receives the value that
the previous rule returned.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from ..utils.errors import UsageError
from ..utils.state import State
from .contexts import EndContext, FoldContext, Folded, LookContext, LossContext, RoundContext, StepContext
from .declarations import Bound
from .requirements import Requirements

if TYPE_CHECKING:
    from .plan import Plan

HOOKS = ("look", "personalize", "batch", "loss", "gradients", "end", "fold")
"""The hooks that act; :meth:`Rule.bind` declares."""
OLD_HOOKS = {
    "client_memory": "Own.memory in bind",
    "server_memory": "Own.server in bind",
    "extra_entries": "Own.model, Own.params and Own.buffers in bind",
    "find_network": "Own.model in bind",
    "restrict_": "Own.bounds in bind",
    "sends": "Bound.sends in bind",
    "notices": "Bound.notices in bind",
    "trainable": "Method.leave_untrained",
    "trainable_at_step": "a Phase in bind",
    "combine_samples": "a GradientEstimator in Method.with_gradient",
    "read_targets": "look, with Reads.targets in bind",
    "observe": "look, with Reads.first in bind",
    "init_local": "personalize, with personalizes = 'start'",
    "personal_model": "personalize, with personalizes = 'use'",
    "transform_loss": "loss",
    "transform_grads": "gradients",
    "finalize": "end",
    "aggregate_memory": "fold",
    "aggregate_entries": "fold, with Bound.sets in bind",
}
"""Hooks of an earlier interface, with their replacements."""
OLD_ATTRIBUTES = {
    "lr_scale": "Phase.lr_scale in bind",
    "decays": "Phase.decay in bind",
    "epochs": "Phase.epochs in bind",
    "leads": "Phase.when in bind",
    "features": "Reads.features in bind",
    "observes": "Reads.first in bind",
    "growing": "Own.growing in bind",
    "finetune_rounds": "Method.with_finetuning",
}
"""Class attributes of that interface, with their replacements; as dataclass fields, these names are allowed."""


class Rule:
    """Base class of rules, which changes nothing.

    ``personalize``, ``batch``, ``loss`` and ``gradients`` run under ``torch.vmap`` and are recorded: they must not
    branch on values of tensors. All hooks are pure, except that ``loss`` may write into :attr:`Own.buffers`.

    Attributes:
        requires: Requirements on the rest of the method, checked before training starts.
        personalizes: ``use``: a client evaluates the result of :meth:`personalize` instead of the entries that it loads
            and keeps; ``start``: local work starts from that model, too.
        buffers_alone: Whether :meth:`personalize` changes only buffers, so that parameters start from the loaded
            values.
        on_copies: Whether :meth:`gradients` is also called, separately, for each rule's :attr:`Own.model`.

    """

    requires: ClassVar[Requirements] = Requirements()
    personalizes: ClassVar[Literal["", "use", "start"]] = ""
    buffers_alone: ClassVar[bool] = False
    on_copies: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, now in OLD_HOOKS.items():
            if name in vars(cls):
                raise UsageError(f"{cls.__name__} defines {name}, which was replaced by {now} (docs/stability.md)")
        for name, now in OLD_ATTRIBUTES.items():
            if name in vars(cls) and name not in vars(cls).get("__annotations__", {}):
                raise UsageError(f"{cls.__name__} sets {name}, which was replaced by {now} (docs/stability.md)")
        if "bind" in vars(cls) and "entries" in signature(cls.bind).parameters:
            raise UsageError(
                f"{cls.__name__} defines bind(entries), which is now bind(plan) and returns a fedshift.Bound"
            )
        if (cls.personalize is not Rule.personalize) != bool(cls.personalizes):
            raise UsageError(
                f"{cls.__name__}: personalize() and the class attribute personalizes ('use' or 'start') go together: "
                "give both or neither"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def source_method(self) -> str:
        """Name of the method that defines the rule (its module), used in messages."""
        return type(self).__module__.rpartition(".")[2]

    def bind(self, plan: Plan) -> Bound:
        """Return the rule resolved against a plan whose rules are not bound yet, with its declarations.

        Raise :class:`UsageError`, without the method's name, to refuse the plan.
        """
        return Bound(self)

    def look(self, client: LookContext) -> State:
        """Return the client's memory for the round, before local work.

        Additional entries, not in :attr:`Own.memory`, last until :meth:`end`.
        """
        return client.memory

    def personalize(self, state: State, client: RoundContext) -> State:
        """Return the client's model, given its loaded and personal entries."""
        return state

    def batch(self, x: Tensor, y: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Return the batch to train on, in the shapes of ``x [B, ...]`` and ``y [B, ...]``."""
        return x, y

    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        """Return the training objective (scalar), given the loss on the batch or the previous rule's objective."""
        return loss

    def gradients(self, grads: State, step: StepContext) -> State:
        """Return the gradients for the optimizer, by name of the model's trained entries.

        For a copy (:attr:`on_copies`), names are the model's, too, and ``step.loaded`` is empty.
        """
        return grads

    def end(self, client: EndContext) -> tuple[State, State]:
        """Return the client's memory after local work, and its upload: exactly :attr:`Bound.sends`."""
        return client.memory, {}

    def fold(self, server: FoldContext) -> Folded:
        """Return the server's memory after a round, and the entries of :attr:`Bound.sets`."""
        return Folded(server.memory)
