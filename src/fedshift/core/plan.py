"""Plans: a method resolved against one model (by :func:`fedshift.core.prepare.prepare`), and its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..base.errors import UsageError
from ..base.state import State
from ..base.streams import stream
from ..data.split import Split
from ..data.transforms import Augmentation
from ..nn.dropout import dropout_key
from .method import Method
from .optimizer import SGD, Optimizer
from .rule import Rule
from .select import Entry
from .work import Work

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A method resolved against one model: which entries do what. Made by :func:`prepare`.

    ``module`` is a stateless template, after surgery; ``initial`` the state that server and clients start from;
    ``loaded``, ``sent`` and ``trained`` are sets of entry names; ``own`` and ``own_trained`` what the rules add on each
    client, by prefixed name; ``freeze_from`` the round (from 0) from which statistics are frozen; ``smallest_batch`` is
    2 where the model cannot train on one sample; ``augment`` is what is done to training images.
    """

    method: Method
    module: nn.Module
    entries: tuple[Entry, ...]
    initial: State
    loaded: frozenset[str]
    sent: frozenset[str]
    trained: frozenset[str]
    own: State
    own_trained: frozenset[str]
    freeze_from: float
    work: Work
    optimizer: Optimizer
    loss: Loss
    smallest_batch: int
    augment: Augmentation | None = None

    @property
    def personal(self) -> frozenset[str]:
        """Entries that a client keeps from round to round instead of loading them."""
        return frozenset(self.initial) - self.loaded

    @property
    def has_global(self) -> bool:
        """Whether the server holds a whole model (FedBN's does not)."""
        return self.sent == frozenset(self.initial)

    @property
    def personalizes(self) -> bool:
        """Whether clients use models of their own, so that one that never trained has none."""
        return bool(self.personal) or any(rule.personalizes for rule in self.method.rules)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model, in which it wants its inputs."""
        return next((t.dtype for t in self.initial.values() if t.is_floating_point()), torch.float32)

    def training_inputs(self, data: Split, index: Tensor, seed: int, client: str, step: int) -> Tensor:
        """Inputs of one local step, augmented as a function of ``(seed, client, step)`` alone."""
        change = self.augment
        if change is None:
            return data.inputs(index, self.dtype)
        return data.inputs(index, self.dtype, lambda x: change(x, stream(seed, "augment", client, step)))

    def require_shared(self, purpose: str) -> None:
        """Raise :class:`UsageError` where clients load no parameter that is trained."""
        if self.method.pooled or not self.trained & self.loaded:
            where = "with all data in one place" if self.method.pooled else "here"
            raise UsageError(f"method {self.method.name!r}: {purpose}, of which there is none {where}: leave it out")

    def require_once(self, rule: Rule) -> None:
        """Raise :class:`UsageError` where the method has another rule of the same kind."""
        if sum(type(other) is type(rule) for other in self.method.rules) > 1:
            raise UsageError(f"method {self.method.name!r} has {rule.origin} twice: leave one of the two out")

    def require_plain_path(self, what: str) -> None:
        """Raise :class:`UsageError` unless each local step moves every parameter along its gradient."""
        if not isinstance(self.optimizer, SGD) or self.optimizer.momentum:
            raise UsageError(
                f"{what} holds for SGD without momentum, not for {self.optimizer}: use sgd with "
                "momentum=0, or another method"
            )
        for rule in self.method.rules:
            if type(rule).start is not Rule.start or type(rule).active is not Rule.active:
                raise UsageError(
                    f"method {self.method.name!r}: {what} holds where every step moves every parameter from what was "
                    f"loaded, which {rule.origin} changes: leave one of the two out"
                )

    def rule_memory(self, index: int) -> str:
        """Prefix under which the rule at ``index`` keeps its memories, so that chained rules never meet."""
        return f"{index}.{type(self.method.rules[index]).__name__.lower()}"


@torch.no_grad()
def forward(plan: Plan, state: State, x: Tensor, *, training: bool = False) -> Tensor:
    """Outputs of the model under ``state`` for inputs ``x``; in training mode BatchNorm updates ``state`` in place."""
    plan.module.train(training)
    with dropout_key(torch.zeros((), dtype=torch.int64, device=x.device)):
        outputs: Tensor = functional_call(plan.module, {**state, **scratch(plan.module)}, (x,))
    return outputs


def scratch(module: nn.Module) -> State:
    """Copies of the non-persistent buffers, so that no client's forward pass can write into the template."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer.clone()
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
        if (buffer := owner._buffers.get(name)) is not None
    }
