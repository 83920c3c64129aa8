"""FedRoD: a generic head learns from balanced classes, and a personal head adapts to the client's class frequencies.

Chen and Chao 2022, arXiv:2107.00778. The body and the generic head minimize the loss of the balanced softmax, which
adds the logarithm of the client's number of training samples of a class, at least 1e-12, to its score. The personal
head, initially a copy of the generic head, minimizes the usual loss of the sum of both heads' scores, with features and
generic scores held constant. The body and the generic head are averaged; the client uses the sum of the heads, which
for linear heads is one head with the sum of their weights. The authors published no code; the formulas follow two
independent implementations (TsingZ0/PFLlib and fluke).
"""

import torch
from torch import Tensor

from ..core.method import Method, method
from ..core.rule import Client, Declared, Network, Rule, State, Step
from ..core.selection import find_classifier
from ..utils.state import pick


class PersonalHead(Rule):
    """Balanced softmax for the model, and a personal head on its features."""

    personalizes = "use"
    needs_shared = "FedRoD adds a personal head to the shared head"
    needs_classes = "FedRoD balances classes"

    def bind(self, network: Network) -> Declared:
        classifier = find_classifier(network.entries, self.source_method)
        names = frozenset(entry.name for entry in network.entries if entry.owner is classifier)
        if not network.loaded & names:
            raise network.refuse_kept(self.needs_shared, names)
        memory = {"class_counts": torch.zeros_like(classifier.weight[:, 0])}
        return Declared(self, model=pick(network.params, names), memory=memory, targets=True)

    def start(self, client: Client) -> State:
        before_K = client.memory["class_counts"]
        return {"class_counts": torch.bincount(client.targets, minlength=len(before_K)).to(before_K.dtype)}

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        prior_K = step.memory["class_counts"].clamp(min=1e-12).log()
        constant = {name: tensor.detach().clone() for name, tensor in step.params.items()}
        together = step.run(self._add_heads(constant, step.own.model))
        balanced = step.criterion(step.outputs + prior_K, step.y) - step.criterion(step.outputs, step.y)
        return loss + balanced + step.criterion(together.outputs, step.y)

    def _add_heads(self, state: State, personal: State) -> State:
        return state | {name: state[name] + tensor for name, tensor in personal.items()}

    def personalize(self, state: State, client: Client) -> State:
        return self._add_heads(state, client.own.model)


@method
def fedrod(base: Method) -> Method:
    """Balance the classes of ``base`` and add a personal head for each client."""
    return base.with_rule(PersonalHead())
