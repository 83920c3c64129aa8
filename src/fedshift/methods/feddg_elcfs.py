"""FedDG-ELCFS: clients exchange amplitudes of images, and each step must also fit images in other clients' styles.

Liu, Chen, Qin, Dou and Heng 2021 (CVPR), arXiv:2103.06030, with details from the authors' public code
(liuquande/FedDG-ELCFS). In each step, every image x of the batch also appears as x': its low-frequency amplitudes A
become (1 - lambda) A + lambda A', where A' is sampled from the other clients' and lambda uniformly from 0..1; its
phases are unchanged. With the gradient g of the loss L on x at weights w, the objective is L(w; x) + L(w - beta g; x'),
in which g is a constant. If targets are masks, it includes boundary times a contrastive loss, which attracts mean
features of contours, in x and x', to each other, and repels them from features of the background around them.

The paper shares complete amplitudes and generates an image in the style of each other client; here only the used ones
are exchanged, and a step samples one image. The code replaces the amplitude of the zero frequency (``L=0``); here it is
interpolated, as in the paper. It keeps its sign, so that the result does not depend on the zero point of inputs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.means import cast_to, stack_entry
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State, Step
from ..nn.amplitude_norm import (
    AmplitudeNorm,
    amplitudes,
    find_first_convolution,
    low_frequencies,
    move_amplitudes,
    sum_waves,
)
from ..nn.dropout import draw_uniform
from ..utils.errors import UsageError

CLIP = 100.0
"""Maximum absolute value in the gradient of the inner step, as in the authors' code."""
AROUND = 5
"""Width of the background around a mask in pixels, as in the authors' code."""
NEVER = -1e30


def _contrast(features: Sequence[Tensor], y_BHW: Tensor, classes: int, tau: float) -> Tensor:
    """Return the contrastive loss between mean features of contours and of the background around them.

    The mean over pairs of embeddings of one kind of ``-log(exp(s_ij) / (exp(s_ij) + sum_q exp(s_iq)))``, where s are
    cosines divided by ``tau`` and q the embeddings of the other kind (NT-Xent: Chen et al. 2020, arXiv:2002.05709),
    summed over classes except the background, class 0. The contour of a mask is removed by erosion by a pixel, and its
    background is added by dilation by ``AROUND`` pixels. Masks without one of the two have no such embedding.

    ``features``: of V versions of the images, ``[B, C, H, W]`` each. ``y_BHW``: masks; ignored pixels are negative.
    """
    maps_VBCHW = torch.stack([*features])
    total = maps_VBCHW.new_zeros(())
    for number in range(1, classes):
        mask_B1HW = (y_BHW == number).to(maps_VBCHW.dtype)[:, None]
        around_B1HW = mask_B1HW
        for _ in range(AROUND):
            around_B1HW = _dilate(around_B1HW)
        contour_B1HW = mask_B1HW - (1 - _dilate(1 - F.pad(mask_B1HW, (1, 1, 1, 1)))[:, :, 1:-1, 1:-1])
        around_B1HW = (around_B1HW - mask_B1HW) * (y_BHW >= 0)[:, None]
        regions_K1B1HW = torch.stack([contour_B1HW, around_B1HW])[:, None]
        sizes_KVB1 = regions_K1B1HW.sum(dim=(4, 5)).expand(-1, len(features), -1, -1)
        z_NC = ((maps_VBCHW * regions_K1B1HW).sum(dim=(4, 5)) / sizes_KVB1.clamp(min=1)).flatten(0, 2)
        present_N = sizes_KVB1.flatten() > 0
        kind_N = torch.arange(len(z_NC), device=z_NC.device) < len(z_NC) // 2
        s_NN = torch.cosine_similarity(z_NC[:, None], z_NC[None], dim=2) / tau
        both_NN, same_NN = present_N[:, None] & present_N, kind_N[:, None] == kind_N
        others_N1 = torch.where(both_NN & ~same_NN, s_NN, NEVER).logsumexp(dim=1, keepdim=True)
        pairs_NN = both_NN & same_NN & ~torch.eye(len(z_NC), dtype=torch.bool, device=z_NC.device)
        losses_NN = F.softplus(others_N1 - s_NN) * pairs_NN
        total = total + losses_NN.sum() / pairs_NN.sum().clamp(min=1)
    return total


def _dilate(mask_B1HW: Tensor) -> Tensor:
    """Return a mask dilated by one pixel in horizontal and vertical directions."""
    down, across = F.max_pool2d(mask_B1HW, (3, 1), 1, (1, 0)), F.max_pool2d(mask_B1HW, (1, 3), 1, (0, 1))
    return torch.maximum(down, across)


class SentAmplitudes(Rule):
    """Exchanges amplitudes, and adds the loss after an inner step on the batch in other clients' styles."""

    beta: float
    boundary: float
    tau: float
    frequencies: int
    observes: int
    features: str = "last"
    needs_shared = "FedDG-ELCFS trains on images in the styles of clients that share a model"
    needs_one_input = "FedDG-ELCFS mixes amplitudes of images"

    def bind(self, network: Network) -> Declared:
        if any(isinstance(entry.owner, AmplitudeNorm) for entry in network.entries):
            raise UsageError(
                "feddg_elcfs trains on amplitudes of other clients' images, but harmofl gives all images the same: use "
                "one of the two"
            )
        channels = find_first_convolution(network.module, "feddg_elcfs mixes amplitudes").in_channels
        size = 2 * self.frequencies + 1
        empty = {"amplitudes": next(iter(network.params.values())).new_zeros(self.observes, channels, size, size)}
        return Declared(
            self,
            memory=empty,
            server={"amplitudes": empty["amplitudes"][:0]},
            growing={"amplitudes": (0,)},
            samples_before_work=self.observes,
            features=self.features,
            draws=True,
            sends=Send.like(empty, "image", passed_on=True),
        )

    def start(self, client: Client) -> State:
        images: list[Tensor] = []
        client.run({"": lambda _, inputs: images.append(inputs[0])})
        measured = amplitudes(low_frequencies(images[0], self.frequencies))
        index = torch.arange(self.observes, device=measured.device) % client.samples
        return client.memory | {"sent": measured[index].to(client.memory["amplitudes"].dtype)}

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        others = step.server["amplitudes"]
        if not len(others):
            return loss
        grads = step.gradient_at(step.params)
        moved = {name: x - self.beta * grads[name].clamp(-CLIP, CLIP) for name, x in step.params.items()}
        styled = step.run(moved, self._mix(step.x, others, step))
        loss = loss + step.criterion(styled.outputs, step.y)
        if not self.boundary or step.y.ndim != 3 or step.outputs.ndim != 4:
            return loss
        features = [_resize(each.features, step.y) for each in (step, styled)]
        return loss + self.boundary * _contrast(features, step.y, step.outputs.shape[1], self.tau)

    def _mix(self, x_BCHW: Tensor, others: Tensor, step: Step) -> Tensor:
        """Return the images, each with amplitudes moved toward one of ``others [M, C, ...]`` from another client."""
        is_own_M = (others[:, None] == step.memory["amplitudes"]).flatten(2).all(dim=2).any(dim=1)
        count = len(x_BCHW)
        score_BM = draw_uniform(step.key, 0, count * len(others), x_BCHW.dtype).reshape(count, -1)
        target = others[torch.where(is_own_M, -1, score_BM).argmax(dim=1)].to(x_BCHW.dtype)
        share_B = draw_uniform(step.key, 1, count, x_BCHW.dtype) * ~is_own_M.all()
        parts = low_frequencies(x_BCHW, self.frequencies)
        moved = share_B[:, None, None, None] * (target - amplitudes(parts))
        return x_BCHW + sum_waves(move_amplitudes(parts, moved), x_BCHW)

    def end(self, client: Client) -> tuple[State, State]:
        sent = client.memory.get("sent", client.memory["amplitudes"])
        return {"amplitudes": sent}, {"amplitudes": sent}

    def fold(self, server: Server) -> Folded:
        sent = stack_entry(server.uploads, "amplitudes").flatten(0, 1)
        return Folded({"amplitudes": cast_to(sent, server.memory["amplitudes"].dtype)})


def _resize(features: Tensor, y_BHW: Tensor) -> Tensor:
    """Resize features ``[B, C, H, W]`` to the size of the masks."""
    if features.ndim != 4:
        raise UsageError(
            f"feddg_elcfs needs features [B, C, H, W], but the input of the layer has shape {list(features.shape)}: "
            "name another layer (features=), or disable the contrastive loss on contours (boundary=0)"
        )
    same = features.shape[2:] == y_BHW.shape[1:]
    return features if same else F.interpolate(features, y_BHW.shape[1:], mode="bilinear")


@method
def feddg_elcfs(
    base: Method, *, beta: float = 1e-3, boundary: float = 0.1, tau: float = 0.05, frequencies: int = 0,
    samples: int = 16, features: str = "last",
) -> Method:  # fmt: skip
    """Train ``base`` also on images in other clients' styles, with a contrastive loss along the contours of masks.

    Args:
        beta: Step size of the inner step.
        boundary: Strength of the contrastive loss on contours, if targets are masks; 0: none.
        tau: Temperature of the contrastive loss.
        frequencies: Number of low frequencies in each direction with exchanged amplitudes; 0: only the mean brightness.
        samples: Number of images whose amplitudes a client uploads in each round.
        features: Layer of the network whose inputs the contrastive loss compares; ``last``: the last layer.

    """
    for name, value in {"beta": beta, "boundary": boundary}.items():
        require(0 <= value < float("inf"), f"{name}={value:g}: give a finite number, 0 or more")
    require(0 < tau < float("inf"), f"tau={tau:g}: give a finite temperature above 0")
    require(frequencies >= 0, f"frequencies={frequencies}: give 0 (only brightness) or more")
    require(samples >= 1, f"samples={samples}: give 1 or more")
    return base.with_rule(SentAmplitudes(beta, boundary, tau, frequencies, samples, features if boundary else ""))
