"""Contexts: the information that the hooks of a rule may read.

Information that is costly or sensitive is refused unless the rule declares it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..nn.linear import use_torch_func
from ..utils.errors import UsageError
from ..utils.state import State
from .aggregation import Received
from .declarations import Declared
from .states import ServerState

if TYPE_CHECKING:
    from .plan import Plan

Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]
"""Called with a layer and its inputs, just before the layer runs."""


class Owned(NamedTuple):
    """Current values of the entries that a rule owns on a client; losses differentiate ``model`` and ``params``."""

    model: State
    params: State
    buffers: State


def _refuse(bound: Declared, what: str, declaration: str) -> UsageError:
    return UsageError(
        f"{type(bound.rule).__name__} reads {what} without declaring it: return "
        f"Declared(self, {declaration}) from its bind()"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientContext:
    """Fields common to all contexts on a client.

    Args:
        bound: The rule and its declarations.
        loaded: The model's entries as the server sent them.
        memory: The rule's memory on this client.
        own: The current values of the rule's own entries.
        server: The rule's memory on the server, as broadcast.
        lr: The model's learning rate in this round; for stacked clients, a scalar tensor in a batch and a loss.

    """

    bound: Declared
    loaded: State
    memory: State
    own: Owned
    server: State
    lr: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundContext(ClientContext):
    """A client's round as a whole.

    Args:
        round: Rounds done before this one.

    """

    round: int


class Glimpse(NamedTuple):
    """Functions that evaluate the round's initial model on some samples, for :meth:`Rule.start`.

    ``samples``: the number of samples. ``run`` and ``loss_at``: see :class:`LookContext`.
    """

    samples: int
    run: Callable[[Mapping[str, Hook]], None]
    loss_at: Callable[[State], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class LookContext(RoundContext):
    """A client's round before local work."""

    _targets: Tensor
    _first: Glimpse

    @property
    def targets(self) -> Tensor:
        """Return the targets of all training samples, ``[N, ...]``; needs ``Declared(self, targets=True)``."""
        if not self.bound.targets:
            raise _refuse(self.bound, "targets", "targets=True")
        return self._targets

    @property
    def samples(self) -> int:
        """Return the number of samples of :meth:`run` and :meth:`loss_at`; all three need ``Declared.first``."""
        return self._glimpse("samples").samples

    def run(self, hooks: Mapping[str, Hook]) -> None:
        """Run the round's initial model once, in training mode and without gradients.

        ``hooks``: callables by layer name (``""``: the network), called with the layer and its inputs. Buffers that
        layers write are discarded.
        """
        self._glimpse("run").run(hooks)

    def loss_at(self, entries: State) -> Tensor:
        """Return the mean loss of that model in evaluation mode, with ``entries`` replaced."""
        return self._glimpse("loss_at").loss_at(entries)

    def _glimpse(self, what: str) -> Glimpse:
        if not self.bound.samples_before_work:
            raise _refuse(self.bound, what, "samples_before_work=samples")
        return self._first


@dataclass(frozen=True, kw_only=True, eq=False)
class StepContext(ClientContext):
    """A local step.

    Args:
        params: Trained entries of the network: the model, or in :meth:`Rule.gradients` possibly a copy.
        buffers: The network's other entries.
        steps: Number of steps taken in the round, an int64 scalar tensor, which a recorded step can vary.

    """

    params: State
    buffers: State
    steps: Tensor
    _personal: State = field(default_factory=dict)
    _key: Tensor

    @property
    def start(self) -> State:
        """Return all entries of the client's model when the round began, loaded and kept ones.

        They are constants under every method: ``step.run(step.start, training=False)`` is a teacher.
        """
        return self.loaded | self._personal

    @property
    def key(self) -> Tensor:
        """Return the int64 scalar that keys the step's random draws; needs ``Declared(self, draws=True)``."""
        if not self.bound.draws:
            raise _refuse(self.bound, "key", "draws=True")
        return self._key


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardPass:
    """A forward pass of a network on a batch, differentiable in the network's parameters.

    Args:
        x: Inputs ``[B, ...]``.
        y: Targets ``[B, ...]``.
        outputs: The network's outputs, ``[B, K]`` for classification.

    """

    bound: Declared
    x: Tensor
    y: Tensor
    outputs: Tensor
    _features: Tensor

    @property
    def features(self) -> Tensor:
        """Return the input of the layer that ``Declared.features`` names; needs ``Declared.features``."""
        if not self.bound.features:
            raise _refuse(self.bound, "features", "features='last'")
        return self._features


@dataclass(frozen=True, kw_only=True, eq=False)
class LossContext(StepContext):
    """The loss of a step.

    Args:
        x: Inputs of the batch, ``[B, ...]``.
        y: Targets of the batch, ``[B, ...]``.
        criterion: The training loss, a function of outputs and targets.

    """

    x: Tensor
    y: Tensor
    criterion: Callable[[Tensor, Tensor], Tensor]
    _make_pass: Callable[[], ForwardPass]
    _run: Callable[..., ForwardPass]
    _loss_at: Callable[[State], Tensor]

    @property
    def outputs(self) -> Tensor:
        """Return the outputs of the pass that computed the loss; in separate phases, run the model on demand."""
        return self._make_pass().outputs

    @property
    def features(self) -> Tensor:
        """Return the input of the layer that ``Declared.features`` names, from the same pass."""
        return self._make_pass().features

    def run(self, entries: State, x: Tensor | None = None, *, training: bool = True) -> ForwardPass:
        """Return the forward pass of the model with ``entries``, on the batch or on the inputs ``x``.

        ``entries`` has all trained entries, and may leave out others, which are copied from the model. It is not
        copied: layers write into its buffers, but never into the model's. Dropout uses the masks of the model's pass.
        With ``training=False``, dropout is off, BatchNorm normalizes by its running statistics, and no buffer is
        written. Raises :class:`UsageError` if a trained entry is missing.
        """
        return self._run(self._complete(entries), self.x if x is None else x, training=training)

    def loss_at(self, entries: State) -> Tensor:
        """Return the loss on the batch of the model with ``entries``, as for :meth:`run`; dropout draws new masks."""
        return self._loss_at(self._complete(entries))

    def _complete(self, entries: State) -> State:
        if missing := self.params.keys() - entries.keys():
            raise UsageError(
                f"{type(self.bound.rule).__name__} runs a model without {min(missing)!r}, which is trained: give all "
                "trained entries: step.start | entries for the client's model when the round began (a teacher), or "
                "step.params | entries for the model in training"
            )
        return entries

    def gradient_at(self, params: State) -> State:
        """Return the gradient of :meth:`loss_at` with respect to ``params``, detached."""
        with use_torch_func():
            grads = torch.func.grad(self.loss_at)({name: tensor.detach() for name, tensor in params.items()})
        return {name: grad.detach() for name, grad in grads.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class EndContext(RoundContext):
    """A client's round after local work.

    Args:
        params: Trained entries of the model.
        buffers: The model's other entries.
        steps: Number of steps in the round.

    """

    params: State
    buffers: State
    steps: int


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldContext:
    """The server after a round.

    Args:
        memory: The rule's memory on the server.
        uploads: What clients sent for the rule, in the order of their names.
        received: The clients' rounds, in the same order.
        plan: The plan.
        server: The server before the round.

    """

    memory: State
    uploads: Sequence[State]
    received: Sequence[Received]
    plan: Plan
    server: ServerState


class Folded(NamedTuple):
    """The rule's memory on the server, and the server's entries that the rule computes."""

    memory: State
    entries: Mapping[str, Tensor] = MappingProxyType({})
