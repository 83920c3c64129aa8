"""Augmentations of training batches: each image gets its own parameters, drawn from a keyed stream.

The new batch has the same shape and dtype, and values in [0, 1]. All draws come from the NumPy generator of a key
(:func:`fedshift.utils.random_streams.stream`), and their number depends only on B. Geometric operations are relative to
the image's center and bilinear. ``fill`` sets pixels from outside the image: ``zeros`` (black), ``border`` (the nearest
pixel) or ``reflection`` (mirrored at the outermost pixels). An image whose parameters change nothing keeps its bits.

Masks move with their images (:func:`augment_masks`): an operation called with integers ``[B, C, H, W]`` moves them with
the same draws, to the nearest pixel; an operation that changes colors leaves them unchanged. 0 marks ignored pixels, so
``zeros`` fills a mask with ignored pixels, and ``border`` and ``reflection`` fill it with the classes of its pixels.

Volumes ``[B, C, D, H, W]`` are augmented within their slices: an operation moves all slices of a volume alike, and
changes the brightness of the volume as a whole.

Sources: color as in torchvision's ``ColorJitter``; recipes from FedBN (Li et al. 2021, arXiv:2102.07623), FedMMB
(Nasirigerdeh et al. 2020, arXiv:2011.07006), FLamby (Ogier du Terrail et al. 2022, arXiv:2210.04620) and nnU-Net
(Isensee et al. 2021, doi:10.1038/s41592-020-01008-z).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from inspect import BoundArguments, signature
from typing import Any, Concatenate, NamedTuple, ParamSpec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.catalog import Catalog
from ..tasks.segmentation import LEFT_OUT, Segmentation
from ..utils.errors import Ref, UsageError
from ..utils.random_streams import stream
from ..utils.user_code import describe_error, identify_function
from .federation import Federation
from .pixels import blend, broadcast_per_image, choose_images, convert_to_gray, rotate_hue, stack_matrices, warp

FILLS = {"zeros": "constant", "border": "replicate", "reflection": "reflect"}
"""Values of ``fill`` for pixels from outside an image, and torch's names for them in padding."""

Draws = np.random.Generator
P = ParamSpec("P")
MIX_TRIALS = 8
"""Draws with which :func:`mixes_images` tries an augmentation."""

Augmentation = Callable[[Tensor, Draws], Tensor]
"""Function of a batch of images ``[B, C, H, W]``, or volumes, in [0, 1] and a generator that returns a new batch."""


class Bound(NamedTuple):
    """Test for an option's values, and an error message for invalid ones, with ``{}`` for the value."""

    allows: Callable[[Any], bool]
    refusal: str


@dataclass(frozen=True, eq=False, repr=False)
class Transform:
    """An operation with its options; operations with the same options are equal and have the same text."""

    make: Callable[..., Any]
    operation: Callable[..., Tensor]
    options: BoundArguments
    moves: bool
    in_slices: bool

    def __call__(self, x: Tensor, rng: Draws, /) -> Tensor:
        """Return the new batch; ``x`` is not modified."""
        args, named = self.options.args, self.options.kwargs
        if x.dim() == 5 and not any(map(callable, (*args, *named.values()))):
            flat = x.flatten(1, 2) if self.in_slices else x.flatten(2, 3)
            return self(flat, rng).reshape(x.shape)
        if self.moves or x.is_floating_point():
            return self.operation(x, rng, *args, **named)
        self.operation(torch.zeros(len(x), 1, 1, 1), rng, *args, **named)  # draws as for images
        return x

    def __repr__(self) -> str:
        named = (f"{option}={value!r}" for option, value in self.options.kwargs.items())
        return f"{self.operation.__name__}({', '.join([*map(repr, self.options.args), *named])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transform) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(self.make, *self.options.args, **self.options.kwargs), ()


def transform(
    *, moves: bool = True, in_slices: bool | None = None, **bounds: Bound
) -> Callable[[Callable[Concatenate[Tensor, Draws, P], Tensor]], Callable[P, Augmentation]]:
    """Turn an operation ``(x, rng, options)`` into a function of its options, which are checked by ``bounds``.

    ``moves``: the operation moves pixels, and thus masks; otherwise it only changes colors. ``in_slices``: it sees the
    slices of a volume as channels ``[B, C D, H, W]``, otherwise side by side, ``[B, C, D H, W]``; None: as ``moves``.
    """

    def decorate(operation: Callable[Concatenate[Tensor, Draws, P], Tensor]) -> Callable[P, Augmentation]:
        whole = signature(operation)
        takes = whole.replace(parameters=list(whole.parameters.values())[2:], return_annotation="Augmentation")

        @wraps(operation)
        def make(*args: P.args, **options: P.kwargs) -> Augmentation:
            chosen = takes.bind(*args, **options)
            chosen.apply_defaults()
            for name, bound in bounds.items():
                if not bound.allows(value := chosen.arguments[name]):
                    raise UsageError(f"{operation.__name__}: {name}={bound.refusal.format(value)}")
            return Transform(make, operation, chosen, moves, moves if in_slices is None else in_slices)

        make.__signature__ = takes  # type: ignore[attr-defined]
        return make

    return decorate


def _accept(augment: object, text: str | None) -> Augmentation | None:
    """Return an augmentation, or a user's function ``(images, rng) -> images`` as one; None and "" are none."""
    if augment is None or augment == "":
        return None
    if isinstance(augment, type) or not callable(augment):
        raise UsageError(
            "{} is not an augmentation: give a text such as 'flip(), rotate(degrees=30)', its value, or a function of "
            "images [B, C, H, W] in [0, 1] and a numpy generator that returns new images",
            Ref(augment=text or augment),
        )
    if text is not None:
        return augment if not re.search(r" at 0x[0-9a-f]+", str(augment)) else _NamedAugmentation(text, augment)
    if isinstance(augment, Transform | _NamedAugmentation):
        return augment
    return _NamedAugmentation(identify_function(augment), augment)


@dataclass(frozen=True)
class _NamedAugmentation:
    """A user's augmentation, identified by its name, because a function's address differs in every run."""

    text: str
    augment: Augmentation

    def __call__(self, x: Tensor, rng: Draws, /) -> Tensor:
        return self.augment(x, rng)

    def __str__(self) -> str:
        return self.text


def check_augmentable(data: Federation, augment: Augmentation) -> None:
    """Raise :class:`UsageError` unless the samples are images that ``augment`` turns into images.

    Pixels must be in 0..255, or values around 0 in [-1, 1]. ``augment`` is tried on two images.
    """
    for name, split in ((client.name, client.train) for client in data.clients):
        if len(split.shape) not in (3, 4):
            raise UsageError(
                f"augment is for images (C, H, W) and volumes (C, D, H, W), but client {name!r} has samples of shape "
                f"{split.shape}: leave augment out"
            )
        low, high = split.find_range() if split.dtype.is_floating_point else (-1, 1)
        if not -1 <= low < 0 < high <= 1:
            raise UsageError(
                f"augment takes pixels 0..255 or values around 0 from -1 to 1, but values of client {name!r} go from "
                f"{low:g} to {high:g}: scale them (2 x - 1 for values from 0 to 1), or leave augment out"
            )
    data.clients[0].train.inputs(slice(0, 2), augment=lambda x: _try(augment, x))
    if isinstance(data.task, Segmentation) and (functions := list(_list_functions(augment))):
        raise UsageError(
            f"augment: {functions[0]} is a function of images, and masks would not move with them: write it with "
            "fedshift.data.augmentation.transform(moves=...), which declares whether it moves pixels"
        )


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


def mixes_images(augment: Augmentation, x: Tensor) -> bool:
    """Return whether an image of a batch like ``x [B, C, H, W]``, with B of 2 or more, changes the results of others.

    The answer comes from a few random draws, and can miss an influence that they do not show.
    """
    others = torch.cat([1 - x[:1], x[1:]])
    for number in range(MIX_TRIALS):
        one, other = (augment(each.clone(), stream(number, "augment", "mix")) for each in (x, others))
        if not torch.equal(one[1:], other[1:]):
            return True
    return False


def augment_masks(augment: Augmentation, y: Tensor, rng: Draws) -> Tensor:
    """Return masks moved in the same way as ``augment`` moves their images with the same draws.

    Args:
        augment: Augmentation without plain user functions among its parts.
        y: Class of each pixel, int64 ``[B, H, W]`` or ``[B, D, H, W]``; negative numbers are ignored pixels.
        rng: Generator with the key of the images' draws.

    Returns:
        Classes like ``y``; :data:`~fedshift.tasks.segmentation.LEFT_OUT` for pixels that are ignored or come
        from outside.

    """
    moved = augment((y + 1).clamp(min=0)[:, None], rng)[:, 0] - 1
    return moved.masked_fill(moved < 0, LEFT_OUT)


def _list_functions(augment: object) -> Iterator[object]:
    """Yield the parts of ``augment`` that are plain user functions."""
    whole = augment.augment if isinstance(augment, _NamedAugmentation) else augment
    if not isinstance(whole, Transform):
        yield augment
    else:
        for each in filter(callable, (*whole.options.args, *whole.options.kwargs.values())):
            yield from _list_functions(each)


_FILL = Bound(lambda v: v in tuple(FILLS), f"{{!r}} is unknown: allowed are {', '.join(FILLS)}")
_PROBABILITY = Bound(lambda v: 0 <= v <= 1, "{:g} is not a probability: it must be in [0, 1]")
_STRENGTH = Bound(lambda v: 0 <= v < float("inf"), "{:g} must be 0 or more")
_SHARE = Bound(lambda v: 0 <= v <= 1, "{:g} must lie in [0, 1]")


def _is_length(value: float) -> bool:
    return value >= 0 if isinstance(value, int) else 0 <= value < 1


def _to_pixels(length: float, side: int) -> int:
    """Convert ``length`` to pixels: an integer is unchanged, a fraction is a share of ``side``."""
    return length if isinstance(length, int) else round(length * side)


def _range_up_to(most: float) -> Bound:
    return Bound(lambda v: 0 < v[0] <= v[1] <= most, f"({{0[0]:g}}, {{0[1]:g}}) must be 0 < low <= high <= {most:g}")


@transform()
def sequence(x: Tensor, rng: Draws, *parts: Augmentation) -> Tensor:
    """Apply augmentations one after another."""
    for part in parts:
        x = part(x, rng)
    return x


@transform(p=_PROBABILITY)
def sometimes(x: Tensor, rng: Draws, augmentation: Augmentation, *, p: float = 0.5) -> Tensor:
    """Augment each image with probability ``p``; leave the others unchanged."""
    return choose_images(rng.random(len(x)) < p, augmentation(x, rng), x)


@transform(p=_PROBABILITY)
def flip(x: Tensor, rng: Draws, *, p: float = 0.5, vertical: bool = False) -> Tensor:
    """Flip left-right with probability ``p``; ``vertical``: flip left-right, upside down or both, equally likely."""
    u = rng.random(len(x))
    x = choose_images(u < p * (2 / 3 if vertical else 1), x.flip(3), x)
    return choose_images((u >= p / 3) & (u < p), x.flip(2), x) if vertical else x


@transform(degrees=Bound(lambda v: 0 <= v <= 180, "{:g} must lie in 0..180"), fill=_FILL)
def rotate(x: Tensor, rng: Draws, *, degrees: float = 30.0, fill: str = "zeros") -> Tensor:
    """Rotate by an angle uniform in ``-degrees..degrees`` (positive is counterclockwise)."""
    angle = np.deg2rad(rng.uniform(-degrees, degrees, len(x)))
    return warp(x, stack_matrices(np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0), fill)


@transform(
    amount=Bound(
        lambda v: 0 < v[0] <= v[1] if isinstance(v, tuple) else 0 <= v < 1, "{} must lie in [0, 1) or be bounds above 0"
    ),
    fill=_FILL,
)
def scale(x: Tensor, rng: Draws, *, amount: float | tuple[float, float] = 0.07, fill: str = "zeros") -> Tensor:
    """Zoom by a factor uniform in ``1 - amount..1 + amount``, or within the bounds ``amount``; the size stays."""
    bounds = amount if isinstance(amount, tuple) else (1 - amount, 1 + amount)
    step = 1 / rng.uniform(*bounds, len(x))
    return warp(x, stack_matrices(step, 0, 0, 0, step, 0), fill)


@transform(degrees=Bound(lambda v: 0 <= v < 90, "{:g} must lie in [0, 90)"), fill=_FILL)
def shear(x: Tensor, rng: Draws, *, degrees: float = 10.0, fill: str = "zeros") -> Tensor:
    """Shift rows so that vertical lines lean by an angle uniform in ``-degrees..degrees``."""
    lean = np.tan(np.deg2rad(rng.uniform(-degrees, degrees, len(x))))
    return warp(x, stack_matrices(np.ones_like(lean), lean, 0, 0, 1, 0), fill)


@transform(padding=Bound(_is_length, "{!r} must be whole pixels from 0 or a share in [0, 1)"), fill=_FILL)
def crop(x: Tensor, rng: Draws, *, padding: float = 4, fill: str = "zeros") -> Tensor:
    """Pad the image on every side and cut a window of the original size at a random position.

    ``padding``: an integer in pixels or a fraction of the side; at most the side minus one pixel. Pixels are moved,
    never interpolated.
    """
    pads = [min(_to_pixels(padding, side), side - 1) for side in x.shape[2:]]
    starts = [torch.from_numpy((rng.random(len(x)) * (2 * pad + 1)).astype(np.int64)).to(x.device) for pad in pads]
    values = x if x.is_floating_point() else x.float()  # torch cannot pad integers by reflection
    padded = F.pad(values, (pads[1], pads[1], pads[0], pads[0]), mode=FILLS[fill]).to(x.dtype)
    image, channel, *sides = (torch.arange(count, device=x.device) for count in x.shape)
    rows, columns = (start[:, None] + side for start, side in zip(starts, sides, strict=True))
    return padded[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]]


@transform(
    moves=False, brightness=_STRENGTH, contrast=_STRENGTH, saturation=_STRENGTH,
    hue=Bound(lambda v: 0 <= v <= 0.5, "{:g} must lie in [0, 0.5], half the circle of colors"),
)  # fmt: skip
def color_jitter(
    x: Tensor, rng: Draws, *, brightness: float = 0.2, contrast: float = 0.2, saturation: float = 0.2, hue: float = 0.05
) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order, as torchvision defines them.

    The first three are multiplied by factors uniform in ``max(0, 1 - strength)..1 + strength``: brightness relative to
    black, contrast to the image's mean gray, saturation to the pixel's own gray. The hue of the HSV color is rotated by
    a fraction of the circle uniform in ``-hue..hue``. Images without three channels have no saturation or hue.
    """
    bounds = [(max(0, 1 - strength), 1 + strength) for strength in (brightness, contrast, saturation)]
    a, b, c, turn = (broadcast_per_image(rng.uniform(*each, len(x)), x) for each in (*bounds, (-hue, hue)))
    x = (x * a).clamp(0, 1)
    x = blend(x, convert_to_gray(x).mean(dim=(2, 3), keepdim=True), b)
    return rotate_hue(blend(x, convert_to_gray(x), c), turn) if x.shape[1] == 3 else x


@transform(moves=False, brightness=_SHARE, contrast=_SHARE)
def brightness_contrast(x: Tensor, rng: Draws, *, brightness: float = 0.2, contrast: float = 0.2) -> Tensor:
    """Change brightness and contrast like albumentations' RandomBrightnessContrast.

    Returns ``a x + b`` clamped to [0, 1], with ``a`` uniform in 1 +- ``contrast`` and ``b`` in +- ``brightness``.
    """
    bounds = (1 - contrast, 1 + contrast), (-brightness, brightness)
    a, b = (broadcast_per_image(rng.uniform(*each, len(x)), x) for each in bounds)
    return (a * x + b).clamp(0, 1)


@transform(moves=False, variance=_STRENGTH)
def noise(x: Tensor, rng: Draws, *, variance: float = 0.1) -> Tensor:
    """Add Gaussian noise; its variance is a share of the image's, uniform in ``0..variance``, as in nnU-Net."""
    share, seeds = rng.uniform(0, variance, len(x)), (rng.random(len(x)) * 2**53).astype(np.int64).tolist()
    drawn = [torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    spread = x.flatten(1).std(dim=1, correction=0)[:, None, None, None]
    made = (x + broadcast_per_image(np.sqrt(share), x) * spread * torch.stack(drawn).to(x)).clamp(0, 1)
    return choose_images(share > 0, made, x)


@transform(moves=False, in_slices=True, sigma=_range_up_to(math.inf))
def blur(x: Tensor, rng: Draws, *, sigma: tuple[float, float] = (0.5, 1.0)) -> Tensor:
    """Blur by a Gaussian whose standard deviation in pixels is uniform within ``sigma``, cut at three times of it."""
    reach = math.ceil(3 * sigma[1])
    square = torch.arange(-reach, reach + 1).to(x).square()
    kernel_BK = torch.exp(-square / (2 * torch.from_numpy(rng.uniform(*sigma, len(x))).to(x)[:, None] ** 2))
    kernel_BK = (kernel_BK / kernel_BK.sum(dim=1, keepdim=True)).repeat_interleave(x.shape[1], dim=0)
    sides = F.pad(x.flatten(0, 1)[None], (reach, reach, reach, reach), mode="replicate")
    across = F.conv2d(sides, kernel_BK[:, None, None], groups=len(kernel_BK))
    return F.conv2d(across, kernel_BK[:, None, :, None], groups=len(kernel_BK)).reshape(x.shape).clamp(0, 1)


@transform(moves=False, in_slices=True, share=_range_up_to(1.0))
def lower_resolution(x: Tensor, rng: Draws, *, share: tuple[float, float] = (0.5, 1.0)) -> Tensor:
    """Take the nearest pixels of a grid with a ``share`` of rows and columns, and interpolate between them (cubic)."""
    fine = x.clone()
    for row, kept in enumerate(rng.uniform(*share, len(x)).tolist()):
        size = [max(1, round(side * kept)) for side in x.shape[2:]]
        if size != list(x.shape[2:]):
            coarse = F.interpolate(x[row : row + 1], size, mode="nearest-exact")
            fine[row] = F.interpolate(coarse, x.shape[2:], mode="bicubic", align_corners=False)[0].clamp(0, 1)
    return fine


@transform(moves=False, bounds=_range_up_to(math.inf))
def gamma(x: Tensor, rng: Draws, *, bounds: tuple[float, float] = (0.7, 1.5), inverted: bool = False) -> Tensor:
    """Raise the image, between its lowest and highest value, to a power within ``bounds``; mean and spread stay.

    The power is below 1 as often as above, if ``bounds`` include both, and uniform on either side, as in nnU-Net.
    ``inverted``: of the negative image.
    """
    low, high = bounds
    below, place = rng.random(len(x)) < 0.5, rng.random(len(x))
    least, most = (np.where(below, low, 1), np.where(below, 1, high)) if low < 1 < high else (low, high)
    power = least + (most - least) * place
    values = (1 - x if inverted else x).flatten(1)
    floor, top = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    extent = torch.where(top > floor, top - floor, 1)
    raised = ((values - floor) / extent).clamp(0, 1) ** torch.from_numpy(power).to(x)[:, None] * extent + floor
    spread = raised.std(dim=1, correction=0, keepdim=True)
    ratio = values.std(dim=1, correction=0, keepdim=True) / torch.where(spread > 0, spread, 1)
    made = ((raised - raised.mean(dim=1, keepdim=True)) * ratio + values.mean(dim=1, keepdim=True)).reshape(x.shape)
    return choose_images(power != 1, (1 - made if inverted else made).clamp(0, 1), x)


@transform(
    moves=False,
    in_slices=True,
    patches=Bound(lambda v: isinstance(v, int) and v >= 1, "{!r} must be a whole number from 1"),
    size=Bound(lambda v: _is_length(v) and v > 0, "{!r} must be whole pixels from 1 or a share in (0, 1)"),
)
def erase(x: Tensor, rng: Draws, *, patches: int = 8, size: float = 16) -> Tensor:
    """Blacken one to ``patches`` squares at random places in the image (DeVries and Taylor 2017, arXiv:1708.04552).

    ``size``: side of a square, an integer in pixels or a fraction of the image's side. Squares may overlap.
    """
    used = np.floor(rng.random(len(x)) * patches)[:, None] >= np.arange(patches)
    covered = []
    for side in x.shape[2:]:
        length = min(max(_to_pixels(size, side), 1), side)
        start = np.floor(rng.random((len(x), patches)) * (side - length + 1))[:, :, None]
        covered.append(torch.from_numpy((np.arange(side) >= start) & (np.arange(side) < start + length)).to(x))
    rows_BPH, columns_BPW = covered
    rows_BPH = rows_BPH * torch.from_numpy(used).to(x)[:, :, None]
    return x.masked_fill(((rows_BPH.mT @ columns_BPW) > 0)[:, None], 0)


def fedbn_office() -> Augmentation:
    """Augment as FedBN does for Office-Caltech10 and DomainNet: flips, and rotation by up to 30 degrees on black."""
    return sequence(flip(p=0.5), rotate(degrees=30.0))


def fedmmb_cifar() -> Augmentation:
    """Augment as FedMMB does for CIFAR-10: left-right flips, brightness, contrast, saturation and hue.

    The paper does not give the strengths; we chose these. The paper doubled the training set once; here, every batch is
    augmented differently.
    """
    return sequence(flip(p=0.5), color_jitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05))


def flamby_isic() -> Augmentation:
    """Augment as FLamby does for Fed-ISIC2019: its albumentations in order, all but the crop with probability 0.5.

    FLamby cuts a window of 200 pixels from an image of 224 (the shorter side), with one to eight holes of 16 pixels.
    Here, images keep their size: the window's position varies by the same 12 pixels in 200, with mirrored pixels beyond
    the edge, a hole is 16 pixels in 200, and the number of holes is drawn for each image.
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


def nnunet() -> Augmentation:
    """Augment as nnU-Net does for medical images: rotation, zoom, noise, blur, brightness, contrast, resolution, gamma.

    Probabilities and ranges are nnU-Net's. Volumes are rotated and zoomed within their slices, as it does where slices
    are thick. Brightness is relative to black, contrast to the mean, and values stay in [0, 1]. There is no mirroring,
    since the sides of a body may be different classes: add ``flip()`` where they are not.
    """
    color = {"saturation": 0, "hue": 0}
    return sequence(
        sometimes(rotate(degrees=30.0), p=0.2),
        sometimes(scale(amount=(0.7, 1.4)), p=0.2),
        sometimes(noise(variance=0.1), p=0.1),
        sometimes(blur(sigma=(0.5, 1.0)), p=0.2),
        sometimes(color_jitter(brightness=0.25, contrast=0, **color), p=0.15),
        sometimes(color_jitter(brightness=0, contrast=0.25, **color), p=0.15),
        sometimes(lower_resolution(share=(0.5, 1.0)), p=0.25),
        sometimes(gamma(bounds=(0.7, 1.5), inverted=True), p=0.1),
        sometimes(gamma(bounds=(0.7, 1.5)), p=0.3),
    )


AUGMENTATIONS = Catalog[Augmentation | None](
    "augmentation", {"none": lambda: None} | {
        function.__name__: function
        for function in (
            sequence, sometimes, flip, rotate, scale, shear, crop, color_jitter, brightness_contrast,
            noise, blur, lower_resolution, gamma, erase, fedbn_office, fedmmb_cifar, flamby_isic, nnunet,
        )
    },
    _accept, spell=lambda value: repr(value) if isinstance(value, Transform) else None, join=sequence,
    setting="augment",
)  # fmt: skip
"""Augmentations by name; several, with commas between, are applied in turn."""
