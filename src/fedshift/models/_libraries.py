"""Networks of timm and HuggingFace by name: ``timm:resnet18``, ``hf:vit(hidden_size=16)``.

Each is made for the samples' channels and the number of classes by the library's own function, with random weights:
nothing is downloaded. ``timm:resnet18(pretrained=True)`` starts from the library's weights, which its own loader takes
from its cache or downloads; images are then scaled as the library prescribes for these weights. Networks of other
libraries come by a user's function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from ..utils.errors import Ref, Sentence, UsageError
from ..utils.user_code import describe_error

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Means and standard deviations by channel, of pixels in [0, 1]."""


def _timm(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    return library.create_model(name, in_chans=shape[0], num_classes=classes, **options)  # type: ignore[no-any-return]


def _scale_timm(library: Any, name: str, options: Mapping[str, Any]) -> Scale:
    known = {**library.get_pretrained_cfg(name).to_dict(), **options.get("pretrained_cfg_overlay", {})}
    found = import_module("timm.data").resolve_data_config(pretrained_cfg=known)
    return tuple(found["mean"]), tuple(found["std"])


def _take_logits(_module: nn.Module, _given: object, made: Any) -> Any:
    return made.logits


def _hf(library: Any, name: str, shape: Any, classes: int, options: Mapping[str, Any]) -> nn.Module:
    image = shape.get("pixel_values", ()) if isinstance(shape, Mapping) else shape
    images = len(image) == 3
    given: dict[str, Any] = {"num_labels": classes, **({"num_channels": image[0]} if images else {}), **options}
    kind = library.AutoModelForImageClassification if images else library.AutoModelForSequenceClassification
    if checkpoint := given.pop("pretrained", None):
        network = kind.from_pretrained(checkpoint, ignore_mismatched_sizes=True, **given)
        if (found := network.config.model_type) != name:
            raise UsageError(f"{checkpoint!r} is of type {found!r}, not {name!r}: write hf:{found}")
    else:
        network = kind.from_config(library.AutoConfig.for_model(name, **given))
    network.register_forward_hook(_take_logits)
    return network  # type: ignore[no-any-return]


def _scale_hf(library: Any, _: str, options: Mapping[str, Any]) -> Scale:
    found = library.AutoImageProcessor.from_pretrained(options["pretrained"])
    return tuple(found.image_mean), tuple(found.image_std)


@dataclass(frozen=True)
class Library:
    """A library: its module and package, functions that make networks and scale images, and its ``pretrained``.

    ``pretrained``: what its networks take as the argument of that name, in words, and its type.
    """

    name: str
    make: Callable[..., nn.Module]
    scale: Callable[..., Scale]
    pretrained: str
    kind: type


LIBRARIES: Mapping[str, Library] = {
    "timm": Library("timm", _timm, _scale_timm, "True", bool),
    "hf": Library("transformers", _hf, _scale_hf, "the name of a checkpoint or its directory", str),
}
"""Libraries by prefix."""


@dataclass(frozen=True)
class LibraryModel:
    """A factory of the networks that a library has under ``name``; ``options``: more arguments for them.

    Raises :class:`UsageError` if the library is absent, or cannot take what the arguments say of pretrained weights.
    """

    library: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        library = LIBRARIES[self.library]
        try:
            import_module(library.name)
        except ModuleNotFoundError as error:
            lacking = error.name or library.name
            raise UsageError(f"model {self} needs the package {lacking}: pip install {lacking}") from error
        if self.pretrained is not False and not isinstance(self.pretrained, library.kind):
            raise UsageError(
                f"model {self}: write pretrained={library.pretrained}, or give a file of weights ({{}})", Ref("weights")
            )

    @property
    def pretrained(self) -> Any:
        """Pretrained weights that are asked for; False: none."""
        return dict(self.options).get("pretrained", False)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.library}:{self.name}" + f"({options})" * bool(options)

    def configure(self, **options: Any) -> LibraryModel:
        """Return the factory with ``options``."""
        return LibraryModel(self.library, self.name, tuple(options.items()))

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Make a network for samples of ``shape``, channels first, or of tokens, and ``classes``."""
        library = LIBRARIES[self.library]
        fix = Sentence(
            f"They come from the cache of {library.name}, or are downloaded: make the network once where there is a "
            "connection, bring the cache here, or leave pretrained out and give a file of weights ({})",
            Ref("weights"),
        )
        network: nn.Module = self._call("its pretrained weights cannot be had", fix, library.make, shape, classes)
        return network

    def find_scale(self, channels: int) -> Scale | None:
        """Return the scale of images of so many channels for the pretrained weights; None without such weights.

        Images of one channel have the mean of the others'. Raises :class:`UsageError` if the library has none.
        """
        if not self.pretrained:
            return None
        fix = Sentence("Name the scale of its images ({})", Ref(normalize="imagenet"))
        scale: Scale = self._call("it does not say how its images are scaled", fix, LIBRARIES[self.library].scale)
        means, deviations = (
            value if len(value) == channels else (sum(value) / len(value),) * channels for value in scale
        )
        return means, deviations

    def _call(self, failed: str, fix: Sentence, function: Callable[..., Any], *given: Any) -> Any:
        """Return the result of ``function``; with pretrained weights, errors say what ``failed`` and the ``fix``."""
        try:
            return function(import_module(LIBRARIES[self.library].name), self.name, *given, dict(self.options))
        except (OSError, RuntimeError, ValueError) as error:
            if not self.pretrained or isinstance(error, UsageError):
                raise
            raise UsageError(f"model {self}: {failed} ({describe_error(error)}). {{}}", fix) from error
