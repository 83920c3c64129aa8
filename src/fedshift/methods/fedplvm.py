"""FedPLVM: several prototypes per class from each client, as its features vary, and a sparse contrast with them.

Wang, Bian, Zhang, Chen and Xu, NeurIPS 2024, arXiv:2403.09048; formulas from the authors' public code
(TriStonesWang/FedPLVM). A client clusters its features of each class, a round's last ones as seen in its steps, by
FINCH and sends the clusters' means; the server clusters all clients' means as in ``fpl``, and u_k is the plain mean of
class k's clusters' means. For each sample with feature z and class k, the loss includes lam times -log(sum over
clusters of k of exp(cos(z, p)^alpha / tau) / the same sum over all clusters) + 2 (1 - cos(z, u_k))^2. Powers alpha
below 1 raise small similarities, so that features that are merely less similar to other classes' prototypes are still
pushed away.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Network, Send, State, Step
from .fpl import ClusterPrototypes

SMALLEST = 1e-3
"""Similarity below which the contrast is constant: the slope of a power below 1 has no bound at 0."""


class LocalClusterPrototypes(ClusterPrototypes):
    """FPL's losses with similarities to the power ``alpha``, and prototypes that clients cluster.

    ``samples``: features that a client keeps, the last ones of a round. ``most``: clusters of a class that it sends; if
    there are more, it sends the class's mean.
    """

    alpha: float = 0.25
    samples: int = 256
    most: int = 8

    def bind(self, network: Network) -> Declared:
        bound = super().bind(network)
        classes, width = bound.buffers["sums"].shape
        zeros = bound.buffers["sums"].new_zeros
        buffers = {"features": zeros(self.samples, width), "labels": zeros(self.samples) - 1, "seen": zeros(())}
        clusters = {"clusters": zeros(classes, self.most, width), "used": zeros(classes, self.most)}
        sends = Send.like(clusters, "class", passed_on=True)
        return replace(bound, buffers=buffers, sends=sends)

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        z_BD, y_B = step.features[-self.samples :], step.y[-self.samples :]
        features_ND, labels_N, seen = (step.own.buffers[name] for name in ("features", "labels", "seen"))
        begun = (step.steps > 0).to(z_BD.dtype)
        labels_N.mul_(begun).sub_(1 - begun)
        seen.mul_(begun)
        places_B = (seen + torch.arange(len(y_B), device=y_B.device)) % step.memory["samples"].clamp(max=self.samples)
        taken_NB = (torch.arange(self.samples, device=y_B.device)[:, None] == places_B).to(z_BD.dtype)
        kept_N = 1 - taken_NB.sum(dim=1)
        features_ND.mul_(kept_N[:, None]).add_(taken_NB @ z_BD.detach())
        labels_N.mul_(kept_N).add_(taken_NB @ y_B.to(z_BD.dtype))
        seen.add_(len(y_B))
        return loss + self.lam * self.pull(step.features, step.y, step.server)

    def sharpen(self, cosine: Tensor) -> Tensor:
        return cosine.clamp(min=SMALLEST) ** self.alpha / self.tau

    def attract(self, z_BD: Tensor, unbiased_BD: Tensor) -> Tensor:
        return 2 * (1 - cosine_similarity(z_BD, unbiased_BD, dim=1)).square()

    def end(self, client: Client) -> tuple[State, State]:
        features_ND, labels_N = (client.own.buffers[name] for name in ("features", "labels"))
        points_ND, here = features_ND.double().cpu(), labels_N.cpu()
        clusters, used = [], []
        for label in range(len(client.server["clusters"])):
            of_class_ND = points_ND[here == label]
            means_MD = self.summarize(of_class_ND)
            means_MD = of_class_ND.mean(dim=0, keepdim=True) if len(means_MD) > self.most else means_MD
            padding = self.most - len(means_MD)
            clusters.append(nn.functional.pad(means_MD, (0, 0, 0, padding)))
            used.append(nn.functional.pad(means_MD.new_ones(len(means_MD)), (0, padding)))
        upload = {"clusters": torch.stack(clusters).to(features_ND), "used": torch.stack(used).to(features_ND)}
        return client.memory, upload

    def list_points(self, uploads: Sequence[State], label: int) -> Tensor:
        return torch.cat([upload["clusters"][label, upload["used"][label] > 0] for upload in uploads])


@method
def fedplvm(base: Method, *, alpha: float = 0.25, tau: float = 0.07, lam: float = 100.0, samples: int = 256) -> Method:
    """Add a sparse contrast with prototypes that clients and server cluster, and attraction to their mean, to ``base``.

    ``alpha``: power of similarities, in (0, 1]. ``tau``: temperature of the contrast. ``lam``: strength of both losses.
    ``samples``: number of features that a client clusters, the last ones of a round.
    """
    require(lam >= 0, f"lam={lam:g} is negative; it must be 0 (neither loss) or more")
    require(0 < alpha <= 1, f"alpha={alpha:g}: give a power in (0, 1]")
    require(tau > 0, f"tau={tau:g}: give a temperature above 0")
    require(samples >= 1, f"samples={samples}: give 1 or more")
    return base.with_rule(LocalClusterPrototypes(lam, tau=tau, alpha=alpha, samples=samples))
