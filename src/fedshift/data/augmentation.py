"""Augmentations of training batches: each image gets its own parameters, drawn from a keyed stream.

An augmentation takes a batch ``[B, C, H, W]`` in [0, 1] and a NumPy generator, that of a key
(:func:`fedshift.utils.random_streams.stream`), and returns a new batch of the same shape and dtype in [0, 1]. All draws
come from that generator, and their number depends on B alone. Geometry is relative to the image's center, bilinear;
pixels from outside the image are ``fill``: ``zeros`` (black), ``border`` (the nearest pixel) or ``reflection``
(mirrored at the outermost pixels).

Sources: color as in torchvision's ``ColorJitter``; recipes from FedBN (Li et al. 2021, arXiv:2102.07623), FedMMB
(Nasirigerdeh et al. 2020, arXiv:2011.07006) and FLamby (Ogier du Terrail et al. 2022, arXiv:2210.04620).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..config.expressions import expressions, resolve
from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream
from ..utils.user_code import describe_error, identify_function
from . import image_transforms as ops
from .federation import Federation
from .image_transforms import Augmentation, Transform

FILLS = ("zeros", "border", "reflection")
"""Values of pixels from outside an image."""


def parse_augmentation(text: str) -> Augmentation | None:
    """Return the augmentation that ``text`` names, for example ``flip(),rotate(degrees=30)``; None for ``none`` or "".

    Several are applied in the order written; ``my_package.module:function`` is a function of yours. Raises
    :class:`UsageError`, which lists the known names.
    """
    if text.strip() in ("", "none"):
        return None
    parts = expressions("augmentation", text, _look_up)
    for part in parts:
        if not callable(part):
            raise UsageError(f"augmentation {text!r} made a {type(part).__name__}, which cannot be called on images")
    whole = parts[0] if len(parts) == 1 else sequence(*parts)
    return whole if not re.search(r" at 0x[0-9a-f]+", str(whole)) else _NamedAugmentation(text, whole)


def as_augmentation(augment: object) -> Augmentation | None:
    """Return an augmentation, the one that a text names, or a function of yours ``(images, rng) -> images``.

    Raises :class:`UsageError` for anything else.
    """
    if augment is None or isinstance(augment, str):
        return parse_augmentation(augment or "")
    if isinstance(augment, type) or not callable(augment):
        raise UsageError(
            f"augment={augment!r} is no augmentation: give a text such as 'flip(), rotate(degrees=30)', its value, or "
            "a function of images [B, C, H, W] in [0, 1] and a numpy generator that returns new images"
        )
    if isinstance(augment, Transform | _NamedAugmentation):
        return augment
    return _NamedAugmentation(identify_function(augment), augment)


def write_augmentation(augment: Augmentation) -> str | None:
    """Return the text that :func:`parse_augmentation` reads as ``augment``; None where there is no such."""
    if isinstance(augment, Transform):
        name, options = augment.operation.__name__, dict(augment.options)
        inner = [
            write_augmentation(part) for part in (*options.pop("parts", ()), options.pop("augmentation", None)) if part
        ]
        arguments = [*map(str, inner), *(f"{option}={value!r}" for option, value in options.items())]
        text = f"{name}({', '.join(arguments)})"
        try:
            return text if parse_augmentation(text) == augment else None
        except UsageError:  # an augmentation of yours is among the parts
            return None
    return None


@dataclass(frozen=True)
class _NamedAugmentation:
    """An augmentation of yours, identified by its name, because a function's address differs in every run."""

    text: str
    augmentation: Augmentation

    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        return self.augmentation(x, rng)

    def __str__(self) -> str:
        return self.text


def check_augmentable(data: Federation, augment: Augmentation) -> None:
    """Raise :class:`UsageError` unless the samples are images that ``augment`` turns into images.

    Their pixels are 0..255, or values around 0 in [-1, 1]. ``augment`` is tried on two of them.
    """
    for client in data.clients:
        split = client.train
        if len(split.shape) != 3:
            raise UsageError(f"augment is for images, but client {client.name!r} has samples of shape {split.shape}")
        if not split.store.is_floating_point():
            continue
        low, high = (float(each) for each in split.store.aminmax())
        if not -1 <= low < 0 < high <= 1:
            raise UsageError(
                f"augment takes pixels 0..255 or values around 0 from -1 to 1, but those of client {client.name!r} go "
                f"from {low:g} to {high:g}: scale them (2 x - 1 for values from 0 to 1), or leave augment out"
            )
    data.clients[0].train.inputs(slice(0, 2), augment=lambda x: _try(augment, x))


def _try(augment: Augmentation, x: Tensor) -> Tensor:
    try:
        made: object = augment(x.clone(), stream(0, "augment", "trial"))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"augment {augment}, called with images {list(x.shape)} and a generator, failed: {describe_error(error)}. "
            "Give a function of both that returns new images"
        ) from error
    if not isinstance(made, Tensor) or (made.shape, made.dtype) != (x.shape, x.dtype):
        kind = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise UsageError(f"augment {augment} made {kind} of {x.dtype} {list(x.shape)}: return images of the same kind")
    return made


def _look_up(name: str) -> Callable[..., Augmentation]:
    if "." in name:
        return resolve("augmentations", name)
    if name not in CATALOG:
        raise unknown_name("augmentation", name, CATALOG)
    return CATALOG[name]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _require_fill(where: str, fill: str) -> None:
    _require(fill in FILLS, f"{where}: fill={fill!r} is unknown: allowed are {', '.join(FILLS)}")


def _is_length(value: float) -> bool:
    return value >= 0 if isinstance(value, int) else 0 <= value < 1


def sequence(*augmentations: Augmentation) -> Augmentation:
    """Apply augmentations one after another."""
    return Transform(ops.sequence, parts=augmentations)


def sometimes(augmentation: Augmentation, *, p: float = 0.5) -> Augmentation:
    """Augment each image with probability ``p``, and leave the others unchanged."""
    _require(0 <= p <= 1, f"sometimes: p={p:g} is no probability: it must lie in [0, 1]")
    return Transform(ops.sometimes, augmentation=augmentation, p=p)


def flip(*, p: float = 0.5, vertical: bool = False) -> Augmentation:
    """Exchange left and right with probability ``p``; ``vertical``: that, upside down or both, equally likely."""
    _require(0 <= p <= 1, f"flip: p={p:g} is no probability: it must lie in [0, 1]")
    return Transform(ops.flip, p=p, vertical=vertical)


def rotate(*, degrees: float = 30.0, fill: str = "zeros") -> Augmentation:
    """Rotate by an angle uniform in ``-degrees..degrees`` (counterclockwise where positive)."""
    _require(0 <= degrees <= 180, f"rotate: degrees={degrees:g} must lie in 0..180")
    _require_fill("rotate", fill)
    return Transform(ops.rotate, degrees=degrees, fill=fill)


def scale(*, amount: float = 0.07, fill: str = "zeros") -> Augmentation:
    """Zoom by a factor uniform in ``1 - amount..1 + amount``; the image keeps its size."""
    _require(0 <= amount < 1, f"scale: amount={amount:g} must lie in [0, 1)")
    _require_fill("scale", fill)
    return Transform(ops.scale, amount=amount, fill=fill)


def shear(*, degrees: float = 10.0, fill: str = "zeros") -> Augmentation:
    """Shift rows so that upright lines lean by an angle uniform in ``-degrees..degrees``."""
    _require(0 <= degrees < 90, f"shear: degrees={degrees:g} must lie in [0, 90)")
    _require_fill("shear", fill)
    return Transform(ops.shear, degrees=degrees, fill=fill)


def crop(*, padding: float = 4, fill: str = "zeros") -> Augmentation:
    """Cut a window of the image's size, at a random place, from the image padded on every side.

    ``padding``: pixels if a whole number, a share of the side if a fraction; at most the side minus one pixel.
    """
    _require(_is_length(padding), f"crop: padding={padding!r} must be whole pixels from 0 or a share in [0, 1)")
    _require_fill("crop", fill)
    return Transform(ops.crop, padding=padding, fill=fill)


def resized_crop(
    *, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (0.75, 4 / 3)
) -> Augmentation:
    """Resize a random window to the image's size (Szegedy et al. 2015, arXiv:1409.4842, section 6).

    ``scale``: bounds of its share of the area, uniform; ``ratio``: of width over height, log-uniform. A window longer
    than the image is cut to the image's side (torchvision draws again).
    """
    for name, (low, high), top in (("scale", scale, 1.0), ("ratio", ratio, float("inf"))):
        _require(0 < low <= high <= top, f"resized_crop: {name}=({low:g}, {high:g}) must be 0 < low <= high <= {top:g}")
    return Transform(ops.resized_crop, scale=scale, ratio=ratio)


def color_jitter(
    *, brightness: float = 0.2, contrast: float = 0.2, saturation: float = 0.2, hue: float = 0.05
) -> Augmentation:
    """Change brightness, contrast, saturation and hue, in this order, as torchvision defines them.

    The first three are multiplied by factors uniform in ``max(0, 1 - strength)..1 + strength``: brightness about black,
    contrast about the image's mean gray, saturation about the pixel's own gray. The hue of the HSV color is rotated by
    a share of the circle uniform in ``-hue..hue``. Images without three channels have no saturation and no hue.
    """
    for name, value in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
        _require(0 <= value < float("inf"), f"color_jitter: {name}={value:g} must be 0 or more")
    _require(0 <= hue <= 0.5, f"color_jitter: hue={hue:g} must lie in [0, 0.5], half the circle of colors")
    return Transform(ops.color_jitter, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)


def brightness_contrast(*, brightness: float = 0.2, contrast: float = 0.2) -> Augmentation:
    """Change brightness and contrast as albumentations' RandomBrightnessContrast.

    Returns ``a x + b`` clamped to [0, 1], ``a`` uniform within ``contrast`` of 1 and ``b`` within ``brightness`` of 0.
    """
    for name, value in (("brightness", brightness), ("contrast", contrast)):
        _require(0 <= value <= 1, f"brightness_contrast: {name}={value:g} must lie in [0, 1]")
    return Transform(ops.brightness_contrast, brightness=brightness, contrast=contrast)


def erase(*, patches: int = 8, size: float = 16) -> Augmentation:
    """Blacken one to ``patches`` squares at random places of the image (DeVries and Taylor 2017, arXiv:1708.04552).

    ``size`` of a square's side: pixels if a whole number, a share of the image's side if a fraction.
    """
    _require(isinstance(patches, int) and patches >= 1, f"erase: patches={patches!r} must be a whole number from 1")
    _require(_is_length(size) and size > 0, f"erase: size={size!r} must be whole pixels from 1 or a share in (0, 1)")
    return Transform(ops.erase, patches=patches, size=size)


def fedbn_office() -> Augmentation:
    """Augment as FedBN for Office-Caltech10 and DomainNet: flips, and rotation by up to 30 degrees on black."""
    return sequence(flip(p=0.5), rotate(degrees=30.0))


def fedmmb_cifar() -> Augmentation:
    """Augment as FedMMB for CIFAR-10: left-right flips, brightness, contrast, saturation and hue.

    The paper gives no strengths, these are ours. It doubled the training set once; here every batch is drawn anew.
    """
    return sequence(flip(p=0.5), color_jitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05))


def flamby_isic() -> Augmentation:
    """Augment as FLamby for Fed-ISIC2019: its albumentations one by one, all but the crop with probability 0.5.

    FLamby cuts a window of 200 pixels from an image of 224 (the shorter side), with one to eight holes of 16 pixels.
    Here images keep their size: the window's place varies by the same 12 pixels in 200, with mirrored pixels beyond the
    edge, and a hole is 16 pixels in 200. FLamby draws the number of holes once for all images; here it is per image.
    """
    return sequence(
        sometimes(scale(amount=0.07, fill="reflection")),
        sometimes(rotate(degrees=50.0, fill="reflection")),
        sometimes(brightness_contrast(brightness=0.15, contrast=0.1)),
        flip(p=0.5, vertical=True),
        sometimes(shear(degrees=0.1)),
        crop(padding=12 / 200, fill="reflection"),
        sometimes(erase(patches=8, size=16 / 200)),
    )


CATALOG: dict[str, Callable[..., Augmentation]] = {
    function.__name__: function
    for function in (
        sequence, sometimes, flip, rotate, scale, shear, crop, resized_crop, color_jitter, brightness_contrast, erase,
        fedbn_office, fedmmb_cifar, flamby_isic,
    )
}  # fmt: skip
"""Augmentations that :func:`parse_augmentation` knows, by name."""
