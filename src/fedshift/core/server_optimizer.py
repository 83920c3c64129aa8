"""Server optimizers: the server treats the mean change of a round as a negative gradient and takes a step.

Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2. The optimizer updates only trained parameters that clients load;
BatchNorm's statistics, other buffers and entries that no client loads are replaced by their aggregate. The state stays
on the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from ..utils.errors import UsageError
from ..utils.state import State, entries_under


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(ABC):
    """Takes a step along the aggregated change ``delta`` of each trained entry; ``lr``: the server's learning rate."""

    lr: float

    def __post_init__(self) -> None:
        if not 0 < self.lr < 1e30:
            raise UsageError(f"server learning rate lr={self.lr:g}: it must be a number above 0")

    @abstractmethod
    def init(self, params: State) -> State:
        """Return the state before the first round."""

    @abstractmethod
    def step(self, params: State, delta: State, state: State, share: float) -> tuple[State, State]:
        """Return the parameters and the state after a round. Pure.

        ``share``: the participants' fraction of the weight of all clients that train; 1 if all take part.
        """


@dataclass(frozen=True, kw_only=True)
class Momentum(ServerOptimizer):
    """``v = beta v + delta; x = x + lr v``, equal to ``torch.optim.SGD`` with momentum on the gradient ``-delta``.

    With ``beta`` 0, it scales the aggregated change and keeps no state.
    """

    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _unit("beta", self.beta)

    @override
    def init(self, params: State) -> State:
        return {f"velocity/{name}": torch.zeros_like(tensor) for name, tensor in params.items()} if self.beta else {}

    @override
    def step(self, params: State, delta: State, state: State, share: float) -> tuple[State, State]:
        if self.beta:
            state = {f"velocity/{n}": self.beta * state[f"velocity/{n}"] + change for n, change in delta.items()}
            delta = entries_under("velocity", state)
        return {name: param + self.lr * delta[name] for name, param in params.items()}, state


@dataclass(frozen=True, kw_only=True)
class Adaptive(ServerOptimizer):
    """``m = beta1 m + (1 - beta1) delta; x = x + lr m / (sqrt(v) + tau)``; ``second`` selects the update of v.

    v starts at tau^2; there is no bias correction (Algorithm 2).
    """

    second: Literal["adagrad", "adam", "yogi"]
    beta1: float
    beta2: float
    tau: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _unit("beta1", self.beta1)
        _unit("beta2", self.beta2)
        if not self.tau > 0:
            raise UsageError(f"tau={self.tau:g}: it must be above 0, say 1e-3")

    @override
    def init(self, params: State) -> State:
        first = {f"mean/{name}": torch.zeros_like(tensor) for name, tensor in params.items()}
        return first | {f"square/{name}": torch.full_like(tensor, self.tau**2) for name, tensor in params.items()}

    @override
    def step(self, params: State, delta: State, state: State, share: float) -> tuple[State, State]:
        moved, after = {}, {}
        for name, param in params.items():
            change, squared, v = delta[name], delta[name] ** 2, state[f"square/{name}"]
            mean = self.beta1 * state[f"mean/{name}"] + (1 - self.beta1) * change
            if self.second == "adagrad":
                v = v + squared
            elif self.second == "adam":
                v = self.beta2 * v + (1 - self.beta2) * squared
            else:
                v = v - (1 - self.beta2) * squared * torch.sign(v - squared)
            moved[name] = param + self.lr * mean / (v.sqrt() + self.tau)
            after[f"mean/{name}"], after[f"square/{name}"] = mean, v
        return moved, after


def _unit(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UsageError(f"{name}={value:g}: it must lie in [0, 1)")
