"""Ditto: each client also trains a personal model, which a proximal term keeps near the global model.

Li et al. 2021, arXiv:2012.04221, Algorithm 1: v = v - lr (grad F(v) + lam (v - w_t)), on the batches that train w for
the server, or in ``epochs`` separate passes (the algorithm's s steps). The client uses v, including its normalization
statistics; the training and averaging of w are unaffected.
"""

from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Network, Phase, Rule, State, Step


class PersonalModel(Rule):
    """A personal model, with a proximal term of strength ``lam`` to the loaded one."""

    lam: float
    epochs: int | None = None
    personalizes = "use"
    needs_shared = "Ditto keeps each client's model near the shared model"

    def bind(self, network: Network) -> Declared:
        after = (Phase(when="after", epochs=self.epochs),) if self.epochs else ()
        return Declared(self, model=network.initial, phases=after)

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        personal, near = step.own.model, [name for name in step.params if name in step.loaded]
        distance = sum((personal[name] - step.loaded[name]).square().sum() for name in near)
        return loss + step.loss_at(personal) + self.lam / 2 * distance

    def personalize(self, state: State, client: Client) -> State:
        return {name: client.own.model[name] for name in state}


@method
def ditto(base: Method, *, lam: float = 1.0, epochs: int | None = None) -> Method:
    """Train a personal model in addition to the model of ``base``; ``lam``: strength of the proximal term.

    ``epochs``: number of epochs per round for the personal model; None: train it on the batches of the global model.
    """
    more = epochs is None or epochs >= 1
    require(more, f"epochs={epochs}: give 1 or more, or leave it out for the batches of the global model")
    require(lam >= 0, f"lam={lam:g} is negative; it must be 0 (local training) or more")
    return base.with_rule(PersonalModel(lam, epochs))
