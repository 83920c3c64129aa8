"""FedPAC: features are pulled to their class's mean over all clients, and each client loads its own mix of classifiers.

Xu, Tong and Huang, ICLR 2023, arXiv:2306.11867; formulas from the authors' public code (JianXu95/FedPAC). A round first
trains the classifier, then the features, whose loss has lam times the pull of ``fedproto``. Client i loads the
classifier sum_j a_ij w_j, where the weights a_i >= 0 with sum 1 minimize sum_j a_ij^2 v_j + |h_i - sum_j a_ij h_j|^2: h
has a row p_k mu_k for each class k, of its share among the client's samples and its mean feature before the features
are trained, and v = (sum_k p_k m_k - |h|^2) / n, of the mean squared norms m_k and n samples, is the variance of h.

That code measures h and v in a separate pass. Here they are of the samples of the first pass until the features are
trained, normalized by batch where there is BatchNorm, and p_k is the share among the classes of these samples. A client
that sits a round out is known by the h that it sent last, and its mix is of the clients that took part.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from math import ceil

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from ..analysis.statistics import Floats
from ..core.means import stack_entry
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Send, Server, State, Step
from ..core.selection import name_classifier
from .fedproto import Prototypes
from .fedrep import HeadThenBody

SMALLEST = 1e-3
"""Weight of a classifier below which a mix does without it, as in the authors' code."""


class AlignedFeatures(Prototypes):
    """A pull of strength ``lam`` to class prototypes, and mixes of classifiers of least expected error.

    The server keeps the weighted means that each client sent last. ``epochs``: epochs of a round, in which all samples
    are seen before the features' parameters move. ``body``: those that clients load and train; ``head``: the
    classifier's entries.
    """

    epochs: int
    body: tuple[str, ...] = field(default=(), repr=False)
    head: tuple[str, ...] = field(default=(), repr=False)
    aggregates = True
    keeps = True
    mixes = True

    def bind(self, network: Network) -> Declared:
        bound, head = super().bind(network), name_classifier(network.entries, self.source_method)
        zeros_KD = bound.server["prototypes"]
        zeros_K, zero = zeros_KD[:, 0].clone(), zeros_KD.new_zeros(())
        body = tuple(sorted((network.trained & network.loaded) - head))
        if not body:
            raise network.refuse_kept("FedPAC averages features of clients", network.trained - head or head)
        if kept := head - (network.sent & network.loaded):
            raise network.refuse_kept("FedPAC mixes classifiers of clients", kept)
        early = {"early_sums": zeros_KD.clone(), "early_squares": zeros_K, "early_counts": zeros_K.clone()}
        early["start"] = torch.zeros_like(_sum_weights(network.params, body))
        sees_all = network.work.batch_size is None or (network.work.epochs or 0) >= self.epochs
        few = (
            f"{network.label} compares clients by the samples that a round uses until the features are trained, "
            f"which may be few and lack classes: with --epochs {self.epochs}, or a larger head, they are all samples"
        )
        described = Send.like({"weighted_means": zeros_KD}, "class") | Send.like({"variance": zero}, "client")
        return replace(
            bound,
            rule=replace(self, body=body, head=tuple(sorted(head))),
            buffers={**bound.buffers, **early},
            memory={**bound.memory, "class_sizes": zeros_K.clone()},
            sends={**bound.sends, **described},
            notices=() if sees_all else (few,),
        )

    def start(self, client: Client) -> State:
        like_K = client.memory["class_sizes"]
        sizes_K = torch.bincount(client.targets, minlength=len(like_K)).to(like_K.dtype)
        return {**super().start(client), "class_sizes": sizes_K}

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        buffers, z_BD = step.own.buffers, step.features.detach()
        sums_KD, squares_K, counts_K = (buffers[f"early_{name}"] for name in ("sums", "squares", "counts"))
        begun = (step.steps > 0).to(z_BD.dtype)
        now = _sum_weights(step.params, self.body).detach()
        buffers["start"].mul_(begun).add_((1 - begun) * now)
        unmoved = (now == buffers["start"]).all()
        taken = (unmoved & (begun * counts_K.sum() < step.memory["samples"])).to(z_BD.dtype)
        member_KB = taken * nn.functional.one_hot(step.y, len(counts_K)).to(z_BD.dtype).T
        sums_KD.mul_(begun).add_(member_KB @ z_BD)
        squares_K.mul_(begun).add_(member_KB @ z_BD.square().sum(dim=1))
        counts_K.mul_(begun).add_(member_KB.sum(dim=1))
        return super().loss(loss, step)

    def end(self, client: Client) -> tuple[State, State]:
        memory, upload = super().end(client)
        buffers, counts_K = client.own.buffers, client.own.buffers["early_counts"]
        seen_K = client.memory["class_sizes"] * (counts_K > 0)
        shares_K, counts_K = seen_K / seen_K.sum(), counts_K.clamp(min=1)
        weighted_KD = shares_K[:, None] * buffers["early_sums"] / counts_K[:, None]
        squares = (shares_K * buffers["early_squares"] / counts_K).sum()
        variance = (squares - weighted_KD.square().sum()).clamp(min=0) / client.memory["samples"]
        return memory, {**upload, "weighted_means": weighted_KD, "variance": variance}

    def fold(self, server: Server) -> Folded:
        clients = [each.client for each in server.received]
        means_NF = stack_entry(server.uploads, "weighted_means").flatten(1)
        variances = np.diag(stack_entry(server.uploads, "variance").cpu().numpy())
        known = server.kept | {c: u["weighted_means"] for c, u in zip(clients, server.uploads, strict=True)}
        mixes = {}
        for client, own in known.items():
            gaps_NF = own.double().flatten() - means_NF
            weights = torch.tensor(_weigh((gaps_NF @ gaps_NF.T).cpu().numpy() + variances))
            mixes[client] = dict.fromkeys(self.head, weights)
        return replace(super().fold(server), entries=server.entries, kept=known, mixes=mixes)


def _weigh(form: Floats) -> Floats:
    """Return the weights ``a >= 0`` with sum 1 that minimize ``a' form a``, without those below :data:`SMALLEST`.

    ``form``: positive semidefinite, float64 ``[N, N]``. Scaled to sum 1, the solution of the nonnegative least squares
    ``|R b|^2 + (1 - sum(b))^2`` with ``R' R = form`` is that minimum: along each direction the best length leaves
    ``q / (1 + q)``, which grows with its ``q = a' form a``.
    """
    count, scale = len(form), float(np.diag(form).max())
    if not scale > 0:
        return np.full(count, 1 / count)
    values, vectors = np.linalg.eigh(form / scale)
    root = np.sqrt(values.clip(min=0))[:, None] * vectors.T
    weights: Floats = nnls(np.vstack([root, np.ones(count)]), np.append(np.zeros(count), 1.0))[0]
    weights /= weights.sum()
    weights[weights <= SMALLEST] = 0.0
    weights /= weights.sum()
    return weights


def _sum_weights(params: State, names: Sequence[str]) -> Tensor:
    """Return the sum of weights of each output unit, and parameters of one dimension as they are, in a vector."""
    return torch.cat([params[name].reshape(*params[name].shape[:1], -1).sum(dim=-1).reshape(-1) for name in names])


@method
def fedpac(base: Method, *, lam: float = 1.0, head: int = 1, body: int = 5) -> Method:
    """Pull the features of ``base`` to class prototypes, and send each client a mix of classifiers.

    ``lam``: strength of the pull. ``head : body``: ratio of a round's steps for the classifier and for the features.
    """
    require(lam >= 0, f"lam={lam:g} is negative; it must be 0 (no pull) or more")
    require(head >= 1 and body >= 1, f"head={head} and body={body}: give 1 or more for each")
    aligned = AlignedFeatures(lam, epochs=ceil((head + body) / head))
    return base.with_rule(aligned).with_rule(HeadThenBody(head / (head + body), 1))
