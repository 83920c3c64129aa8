"""FedDG-ELCFS: clients exchange amplitudes of images, and each step must also fit images in the look of others.

Liu, Chen, Qin, Dou and Heng 2021 (CVPR), arXiv:2103.06030, with details from the authors' public code
(liuquande/FedDG-ELCFS). A client uploads the amplitudes of some of its images at low frequencies and gets those of
others. In each step, every image x of the batch also appears as x': its amplitudes A move to (1 - lambda) A +
lambda A', where A' is drawn among the others' and lambda uniformly in 0..1, and its phases stay. With the gradient g of
the loss L on x at weights w, the objective is L(w; x) + L(w - beta g; x'), in which g is a constant. Where targets are
masks, it gains boundary times a contrastive loss over mean features: those of contours, of x and x' alike, are pulled
together, those of the background around are pushed away.

The paper shares whole amplitudes and draws one image in the look of each other client; here the amplitudes that are
exchanged are the ones that are used, and each image is drawn anew in each step. The code replaces the amplitude of the
zero frequency (``L=0``), and its interpolation is commented out; here it is the paper's. The zero frequency, a
channel's brightness, counts with its sign, so that the result does not depend on the zero point of normalized inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from typing_extensions import override

from ..core.contexts import EndContext, FoldContext, Folded, LookContext, LossContext
from ..core.declarations import Bound, Own, Reads, Send
from ..core.means import cast_to, stack_entry
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.requirements import Requirements
from ..core.rule import Rule
from ..nn.amplitude_norm import amplitudes, low_frequencies, move_amplitudes, sum_waves
from ..nn.dropout import draw_uniform
from ..utils.errors import UsageError
from ..utils.state import State

DRAW = 2**21
CLIP = 100.0
"""Largest value in the gradient of the inner step, the authors' code's."""
AROUND = 5
"""Pixels around a mask that are its background, the authors' code's."""
NEVER = -1e30


def _contrast(features: Sequence[Tensor], y_BHW: Tensor, classes: int, tau: float) -> Tensor:
    """Return the contrastive loss between mean features of contours and of the background around them.

    It is the mean over pairs of embeddings of one kind, of ``-log(exp(s_ij) / (exp(s_ij) + sum_q exp(s_iq)))``, where s
    are cosines divided by ``tau`` and q the embeddings of the other kind (NT-Xent: Chen et al. 2020, arXiv:2002.05709),
    summed over classes but the background, class 0. The contour of a mask is what erosion by a pixel removes, its
    background what dilation by ``AROUND`` pixels adds. Masks without one of the two have no such embedding.

    Args:
        features: Of each version of the images, ``[B, C, H, W]``.
        y_BHW: Masks; pixels that are left out are negative.
        classes: How many classes there are.
        tau: Temperature.

    """
    total = features[0].new_zeros(())
    for number in range(1, classes):
        mask_B1HW = (y_BHW == number).to(features[0].dtype)[:, None]
        around_B1HW = mask_B1HW
        for _ in range(AROUND):
            around_B1HW = _dilate(around_B1HW)
        contour_B1HW = mask_B1HW - (1 - _dilate(1 - F.pad(mask_B1HW, (1, 1, 1, 1)))[:, :, 1:-1, 1:-1])
        around_B1HW = (around_B1HW - mask_B1HW) * (y_BHW >= 0)[:, None]
        regions = [region for region in (contour_B1HW, around_B1HW) for _ in features]
        sizes = [region.sum(dim=(2, 3)) for region in regions]
        sums = [(f * region).sum(dim=(2, 3)) for f, region in zip([*features, *features], regions, strict=True)]
        z_NC = torch.cat([total_BC / size.clamp(min=1) for total_BC, size in zip(sums, sizes, strict=True)])
        there_N = torch.cat(sizes).flatten() > 0
        kind_N = torch.arange(len(z_NC), device=z_NC.device) < len(z_NC) // 2
        s_NN = torch.cosine_similarity(z_NC[:, None], z_NC[None], dim=2) / tau
        both_NN, alike_NN = there_N[:, None] & there_N, kind_N[:, None] == kind_N
        others_N1 = torch.where(both_NN & ~alike_NN, s_NN, NEVER).logsumexp(dim=1, keepdim=True)
        pairs_NN = both_NN & alike_NN & ~torch.eye(len(z_NC), dtype=torch.bool, device=z_NC.device)
        losses_NN = F.softplus(others_N1 - s_NN) * pairs_NN
        total = total + losses_NN.sum() / pairs_NN.sum().clamp(min=1)
    return total


def _dilate(mask_B1HW: Tensor) -> Tensor:
    """Return a mask and the pixels above, below and beside it."""
    down, across = F.max_pool2d(mask_B1HW, (3, 1), 1, (1, 0)), F.max_pool2d(mask_B1HW, (1, 3), 1, (0, 1))
    return torch.maximum(down, across)


@dataclass(frozen=True)
class SentAmplitudes(Rule):
    """Amplitudes that clients send, and the loss after a step on a batch, on the batch in the look of others."""

    beta: float
    boundary: float
    tau: float
    frequencies: int
    observes: int
    features: str = "last"
    requires = Requirements(
        shared_entries="FedDG-ELCFS trains on images in the look of clients with which a model is shared"
    )

    @override
    def bind(self, plan: Plan) -> Bound:
        first = next((entry.owner for entry in plan.entries if isinstance(entry.owner, _ConvNd)), None)
        if not isinstance(first, nn.Conv2d):
            raise UsageError(
                "feddg_elcfs mixes amplitudes of images, which the model's first convolution (Conv2d) sees, and it has "
                "none: use another method"
            )
        size = 2 * self.frequencies + 1
        empty = {"amplitudes": next(iter(plan.params.values())).new_zeros(self.observes, first.in_channels, size, size)}
        return Bound(
            self,
            own=Own(memory=empty, server={"amplitudes": empty["amplitudes"][:0]}, growing={"amplitudes": (0,)}),
            reads=Reads(first=self.observes, features=self.features, draws=True),
            sends=Send.like(empty, "image", passed_on=True),
        )

    @override
    def look(self, client: LookContext) -> State:
        found: State = {}

        def measure(module: nn.Module, given: tuple[Tensor, ...]) -> None:  # noqa: ARG001
            made = amplitudes(low_frequencies(given[0], self.frequencies))
            index = torch.arange(self.observes, device=made.device) % client.samples
            found["sent"] = made[index].to(client.memory["amplitudes"].dtype)

        client.run({"": measure})
        return client.memory | found

    @override
    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        others = step.server["amplitudes"]
        if not len(others):
            return loss
        grads = step.gradient_at(step.params)
        moved = {name: x - self.beta * grads[name].clamp(-CLIP, CLIP) for name, x in step.params.items()}
        there = step.run(moved, self._mix(step.x, others, step))
        loss = loss + step.criterion(there.outputs, step.y)
        if not self.boundary or step.y.ndim != 3 or step.outputs.ndim != 4:
            return loss
        features = [_resize(each.features, step.y) for each in (step, there)]
        return loss + self.boundary * _contrast(features, step.y, step.outputs.shape[1], self.tau)

    def _mix(self, x_BCHW: Tensor, others: Tensor, step: LossContext) -> Tensor:
        """Return the images with amplitudes that moved towards one of ``others [M, C, ...]`` each, but the client's."""
        is_own_M = (others[:, None] == step.memory["amplitudes"]).flatten(2).all(dim=2).any(dim=1)
        count = len(x_BCHW)
        score_BM = draw_uniform(step.key, DRAW, count * len(others), x_BCHW.dtype).reshape(count, -1)
        given = others[torch.where(is_own_M, -1, score_BM).argmax(dim=1)].to(x_BCHW.dtype)
        share_B = draw_uniform(step.key, DRAW + 1, count, x_BCHW.dtype) * ~is_own_M.all()
        parts = low_frequencies(x_BCHW, self.frequencies)
        moved = share_B[:, None, None, None] * (given - amplitudes(parts))
        return x_BCHW + sum_waves(move_amplitudes(parts, moved), x_BCHW)

    @override
    def end(self, client: EndContext) -> tuple[State, State]:
        sent = client.memory.get("sent", client.memory["amplitudes"])
        return {"amplitudes": sent}, {"amplitudes": sent}

    @override
    def fold(self, server: FoldContext) -> Folded:
        sent = stack_entry(server.uploads, "amplitudes").flatten(0, 1)
        return Folded({"amplitudes": cast_to(sent, server.memory["amplitudes"].dtype)})


def _resize(features: Tensor, y_BHW: Tensor) -> Tensor:
    """Return features ``[B, C, H, W]`` of the size of masks."""
    if features.ndim != 4:
        raise UsageError(
            f"feddg_elcfs compares features [B, C, H, W], and the layer it reads gets {list(features.shape)}: "
            "name another one (features=), or leave masks' contours out (boundary=0)"
        )
    same = features.shape[2:] == y_BHW.shape[1:]
    return features if same else F.interpolate(features, y_BHW.shape[1:], mode="bilinear")


@method
def feddg_elcfs(
    base: Method,
    *,
    beta: float = 1e-3,
    boundary: float = 0.1,
    tau: float = 0.05,
    frequencies: int = 0,
    samples: int = 16,
    features: str = "last",
) -> Method:
    """Train ``base`` on images in the look of other clients too, and on features along the contours of masks.

    Args:
        base: FedAvg unless given.
        beta: Length of the inner step, times the gradient.
        boundary: Strength of the contrastive loss on contours, where targets are masks; 0: none.
        tau: Its temperature.
        frequencies: Low frequencies in each direction whose amplitudes are exchanged; 0: the mean brightness alone.
        samples: Images of a client whose amplitudes it uploads in each round.
        features: Layer of the network whose input the contrastive loss compares; ``last``: that of the last layer.

    """
    for name, value in {"beta": beta, "boundary": boundary}.items():
        if not 0 <= value < float("inf"):
            raise UsageError(f"{name}={value:g}: give a finite number, 0 or more")
    if not 0 < tau < float("inf"):
        raise UsageError(f"tau={tau:g}: give a finite temperature above 0")
    if frequencies < 0:
        raise UsageError(f"frequencies={frequencies}: give 0 (brightness alone) or more")
    if samples < 1:
        raise UsageError(f"samples={samples}: give 1 or more")
    read = features if boundary else ""
    return base.with_rule(SentAmplitudes(float(beta), float(boundary), float(tau), frequencies, samples, read))
