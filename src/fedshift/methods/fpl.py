"""FPL: several prototypes per class, one for each cluster of similar clients, and their unbiased mean.

Huang, Ye, Shi, Li and Du, CVPR 2023, "Rethinking Federated Learning with Domain Shift: A Prototype View"; formulas from
the authors' public code (WenkeHuang/RethinkFL, models/fpl.py). The server clusters the clients' prototypes of a class
by FINCH (Sarfraz, Sharma and Stiefelhagen 2019, arXiv:1902.11266): each is linked to its nearest neighbor by cosine
similarity, connected components are clusters, and the clusters' means are clustered again. It keeps the last partition
with more than one cluster, or the first. A class's unbiased prototype is the plain mean of its clusters' means, so that
a domain counts equally for any number of clients. For each sample with feature z and class k, the loss includes the
mean square of z minus the unbiased prototype of k, and -log(sum over clusters of k of exp(cos(z, p) / tau) / the same
sum over all clusters). Clients' prototypes are defined in ``fedproto``; a class that no client sends in a round has
none in the next, as in that code.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from ..core.method import Method, method, require
from ..core.rule import Declared, Folded, Network, Server, State
from .fedproto import Prototypes

UNUSED = -1e9
"""Similarity to a missing prototype, whose exponential and gradient are 0."""


def _link_nearest(points_ND: Tensor) -> Tensor:
    """Return the connected components of the graph that links each point to its nearest neighbor."""
    unit_ND = normalize(points_ND.double(), dim=1)
    near_N = (unit_ND @ unit_ND.T).fill_diagonal_(-np.inf).argmax(dim=1).numpy()
    count = len(near_N)
    links = coo_matrix((np.ones(count), (np.arange(count), near_N)), shape=(count, count))
    return torch.from_numpy(connected_components(links, directed=False)[1].astype(np.int64))


def _average(points_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Return the mean of each cluster's points, ``[clusters, D]``."""
    return torch.stack([points_ND[labels_N == label].mean(dim=0) for label in range(int(labels_N.max()) + 1)])


class ClusterPrototypes(Prototypes):
    """Contrastive loss with the clusters' prototypes at temperature ``tau``, and attraction to their unbiased mean."""

    tau: float = 0.02

    def bind(self, network: Network) -> Declared:
        bound = super().bind(network)
        zeros_KD = bound.server["prototypes"]
        memory = {"clusters": zeros_KD[:, None], "used": zeros_KD[:, :1]}
        return replace(bound, server=memory, growing={"clusters": (1,), "used": (1,)})

    @staticmethod
    def cluster(points_ND: Tensor) -> Tensor:
        """Return the cluster of each point by FINCH with cosine distances, int64 ``[N]``."""
        labels_N = _link_nearest(points_ND)
        while True:
            coarser_N = _link_nearest(_average(points_ND, labels_N))[labels_N]
            lost = int(labels_N.max() - coarser_N.max())
            if lost == 0 or not coarser_N.any():
                return labels_N
            labels_N = coarser_N
            if lost == 1:
                return labels_N

    @classmethod
    def summarize(cls, points_ND: Tensor) -> Tensor:
        """Return the means of the clusters of points, ``[clusters, D]``."""
        return _average(points_ND, cls.cluster(points_ND)) if len(points_ND) else points_ND

    def pull(self, z_BD: Tensor, y_B: Tensor, memory: State) -> Tensor:
        used_KM, clusters_KMD = memory["used"], memory["clusters"]
        count_K = used_KM.sum(dim=1)
        unbiased_KD = clusters_KMD.sum(dim=1) / count_K.clamp(min=1)[:, None]
        attraction_B = self.attract(z_BD, unbiased_KD[y_B])
        similarity_BP = normalize(z_BD, dim=1) @ normalize(clusters_KMD, dim=2).flatten(0, 1).T
        logits_BP = self.sharpen(similarity_BP).masked_fill(used_KM.flatten() == 0, UNUSED)
        places = torch.arange(len(count_K), device=y_B.device).repeat_interleave(used_KM.shape[1])
        positive_BP = logits_BP.masked_fill(places != y_B[:, None], UNUSED)
        contrast_B = logits_BP.logsumexp(dim=1) - positive_BP.logsumexp(dim=1)
        return ((count_K > 0).to(z_BD.dtype)[y_B] * (contrast_B + attraction_B)).mean()

    def sharpen(self, cosine: Tensor) -> Tensor:
        """Return the logits of the contrast, given similarities in [-1, 1]."""
        return cosine / self.tau

    def attract(self, z_BD: Tensor, unbiased_BD: Tensor) -> Tensor:
        """Return the loss of each feature, given the unbiased prototype of its class."""
        return (z_BD - unbiased_BD).square().mean(dim=1)

    def fold(self, server: Server) -> Folded:
        before = server.memory["clusters"]
        points = [self.list_points(server.uploads, label).double().cpu() for label in range(len(before))]
        clusters = [self.summarize(points_ND) for points_ND in points]
        together = (pad_sequence(each, batch_first=True) for each in (clusters, [x.new_ones(len(x)) for x in clusters]))
        return Folded({name: each.to(before) for name, each in zip(("clusters", "used"), together, strict=True)})

    def list_points(self, uploads: Sequence[State], label: int) -> Tensor:
        """Return the prototypes of a class in all uploads, ``[N, D]``."""
        counts_U = torch.stack([upload["counts"][label] for upload in uploads])
        return torch.stack([upload["prototypes"][label] for upload in uploads])[counts_U > 0]


@method
def fpl(base: Method, *, tau: float = 0.02, lam: float = 1.0) -> Method:
    """Add a contrastive loss with cluster prototypes and attraction to unbiased prototypes to ``base``.

    ``tau``: temperature of the contrast; ``lam``: strength of both losses.
    """
    require(lam >= 0, f"lam={lam:g} is negative; it must be 0 (neither loss) or more")
    require(tau > 0, f"tau={tau:g}: give a temperature above 0")
    return base.with_rule(ClusterPrototypes(lam, tau=tau))
