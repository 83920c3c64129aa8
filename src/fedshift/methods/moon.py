"""MOON: a contrastive loss attracts features to the server model's and repels them from the client's previous model's.

Li, He and Song 2021, arXiv:2103.16257; formulas from the authors' public code (QinbinLi/MOON). Let z, z_glob and z_prev
be the features of a sample under the trained model, the server's model and the client's model after its previous round.
The loss includes the mean over the batch of mu * -log(exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) +
exp(cos(z, z_prev) / tau))). As in that code, the two other models run in evaluation mode. A client's previous model is
at first the initial one, so that the first round equals FedAvg's if all clients take part in it.
"""

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Network, Rule, State, Step


class PreviousModel(Rule):
    """The model-contrastive loss of strength ``mu`` at temperature ``tau``; clients keep their previous model."""

    mu: float
    tau: float
    features: str = "last"
    needs_shared = "MOON attracts features to the shared model's"

    def bind(self, network: Network) -> Declared:
        return Declared(self, memory=network.initial, features=self.features)

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        others = [step.run(state, training=False).features for state in (step.start, step.memory)]
        z = step.features.flatten(1)
        similarity_B2 = torch.stack([torch.cosine_similarity(z, other.flatten(1)) for other in others], dim=1)
        return loss - self.mu * (similarity_B2 / self.tau).log_softmax(dim=1)[:, 0].mean()

    def end(self, client: Client) -> tuple[State, State]:
        return client.params | client.buffers, {}


@method
def moon(base: Method, *, mu: float = 1.0, tau: float = 0.5, features: str = "last") -> Method:
    """Add the model-contrastive loss of strength ``mu`` at temperature ``tau`` to ``base``; needs clients with state.

    ``features``: layer of the network whose inputs are compared; ``last``: the classifier.
    """
    require(mu >= 0, f"mu={mu:g} is negative; it must be 0 (FedAvg) or more")
    require(tau > 0, f"tau={tau:g}: give a temperature above 0")
    return base.with_rule(PreviousModel(mu, tau, features))
