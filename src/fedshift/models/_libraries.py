"""Networks of installed libraries by name: ``timm:resnet18``, ``monai:UNet(channels=(8, 16))``, ``hf:vit``.

Each is made for the samples' channels and the number of classes by the library's own function, with random weights:
nothing is downloaded. ``timm:resnet18(pretrained=True)`` starts from the library's weights, which its own loader takes
from its cache or downloads; images are then scaled as the library prescribes for these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

from torch import nn

from ..utils.errors import Ref, Sentence, UsageError, unknown_name
from ..utils.user_code import describe_error

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Means and standard deviations by channel, of pixels in [0, 1]."""


def _timm(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    return library.create_model(name, in_chans=shape[0], num_classes=classes, **options)  # type: ignore[no-any-return]


def _scale_timm(library: Any, name: str, options: Mapping[str, Any]) -> Scale:
    known = {**library.get_pretrained_cfg(name).to_dict(), **options.get("pretrained_cfg_overlay", {})}
    found = import_module("timm.data").resolve_data_config(pretrained_cfg=known)
    return tuple(found["mean"]), tuple(found["std"])


def _find_weights(library: Any, name: str, pretrained: Any) -> Any:
    weights = library.get_model_weights(name)
    if pretrained is not True and pretrained not in weights.__members__:
        raise unknown_name(f"pretrained weights of torchvision:{name}", pretrained, weights.__members__)
    return weights.DEFAULT if pretrained is True else weights[pretrained]


def _torchvision(library: Any, name: str, _: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    others = {each: value for each, value in options.items() if each != "pretrained"}
    if options.get("pretrained"):
        weights = _find_weights(library, name, options["pretrained"])
        return _replace_classifier(library.get_model(name, weights=weights, **others), classes)
    takes = signature(library.get_model_builder(name)).parameters
    backbone = {"weights_backbone": None} if "weights_backbone" in takes else {}  # else it would be downloaded
    return library.get_model(name, num_classes=classes, **backbone, **others)  # type: ignore[no-any-return]


def _scale_torchvision(library: Any, name: str, options: Mapping[str, Any]) -> Scale:
    preset = _find_weights(library, name, options["pretrained"]).transforms()
    return tuple(preset.mean), tuple(preset.std)


def _replace_classifier(network: nn.Module, classes: int) -> nn.Module:
    """Return ``network`` with as many outputs of its last layer as there are classes, at random unless it has them."""
    name, last = [(name, each) for name, each in network.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)][-1]
    if isinstance(last, nn.Linear):
        new: nn.Module = nn.Linear(last.in_features, classes, bias=last.bias is not None)
    else:
        new = nn.Conv2d(last.in_channels, classes, last.kernel_size, bias=last.bias is not None)  # type: ignore[arg-type]
    if new.weight.shape != last.weight.shape:
        holder, _, at = name.rpartition(".")
        setattr(network.get_submodule(holder), at, new)
    return network


def _monai(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    given: dict[str, Any] = {"spatial_dims": len(shape) - 1, "in_channels": shape[0], "out_channels": classes}
    return getattr(library, name)(**{**given, **options})  # type: ignore[no-any-return]


def _smp(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    others = {each: value for each, value in options.items() if each != "pretrained"}
    given: dict[str, Any] = {"encoder_weights": _name_encoder_weights(options), "in_channels": shape[0]}
    return getattr(library, name)(**{**given, "classes": classes, **others})  # type: ignore[no-any-return]


def _name_encoder_weights(options: Mapping[str, Any]) -> str | None:
    pretrained = options.get("pretrained")
    return "imagenet" if pretrained is True else pretrained or None


def _scale_smp(library: Any, name: str, options: Mapping[str, Any]) -> Scale:
    default = signature(getattr(library, name)).parameters["encoder_name"].default
    encoder = options.get("encoder_name", default)
    found = library.encoders.get_preprocessing_params(encoder, pretrained=_name_encoder_weights(options))
    if found["input_space"] != "RGB":
        raise UsageError(f"encoder {encoder!r} takes images in {found['input_space']}: choose one that takes RGB")
    top = float((found["input_range"] or (0, 1))[1])
    return tuple(value / top for value in found["mean"]), tuple(value / top for value in found["std"])


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
    """A library: the module of its networks, the package to install, and functions that make and scale.

    ``pretrained``: what its networks take as the argument of that name; empty: nothing. ``scale``: returns the scale of
    images for the pretrained weights.
    """

    module: str
    package: str
    make: Callable[..., nn.Module]
    pretrained: str = ""
    scale: Callable[..., Scale] | None = None


LIBRARIES: Mapping[str, Library] = {
    "timm": Library("timm", "timm", _timm, "True", _scale_timm),
    "torchvision": Library(
        "torchvision.models", "torchvision", _torchvision, "True or the name of weights", _scale_torchvision
    ),
    "monai": Library("monai.networks.nets", "monai", _monai),
    "smp": Library(
        "segmentation_models_pytorch", "segmentation-models-pytorch", _smp, "True or the name of weights", _scale_smp
    ),
    "hf": Library("transformers", "transformers", _hf, "the name of a checkpoint or its directory", _scale_hf),
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
            import_module(library.module)
        except ModuleNotFoundError as error:
            lacking = library.package if error.name in (None, library.module.partition(".")[0]) else error.name
            raise UsageError(f"model {self} needs the package {lacking}: pip install {lacking}") from error
        given = dict(self.options)
        takes = f"write pretrained={library.pretrained}" if library.pretrained else "leave it out"
        for name in given.keys() & {"weights", "encoder_weights", "weights_backbone"}:
            if given[name]:
                raise UsageError(
                    f"model {self}: {name} is given in another way: {takes}, or give a file of weights ({{}})",
                    Ref("weights"),
                )
        named = self.library in ("hf", "torchvision", "smp") and isinstance(self.pretrained, str)
        if self.pretrained and not named and not (self.pretrained is True and library.pretrained.startswith("True")):
            raise UsageError(
                f"model {self}: pretrained={self.pretrained!r}: {takes}, or give a file of weights ({{}})",
                Ref("weights"),
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
            f"They come from the cache of {library.package}, or are downloaded: make the network once where there is a "
            "connection, bring the cache here, or leave pretrained out and give a file of weights ({})",
            Ref("weights"),
        )
        network: nn.Module = self._call("its pretrained weights cannot be had", fix, library.make, shape, classes)
        return network

    def find_scale(self, channels: int) -> Scale | None:
        """Return the scale of images of so many channels for the pretrained weights; None without such weights.

        Images of one channel have the mean of the others'. Raises :class:`UsageError` if the library has none.
        """
        scale = LIBRARIES[self.library].scale
        if not (self.pretrained and scale):
            return None
        fix = Sentence("Name the scale of its images ({})", Ref(normalize="imagenet"))
        means, deviations = self._call("it does not say how its images are scaled", fix, scale)
        return _fit(means, channels), _fit(deviations, channels)

    def _call(self, failed: str, fix: Sentence, function: Callable[..., Any], *given: Any) -> Any:
        """Return the result of ``function``; with pretrained weights, errors say what ``failed`` and the ``fix``."""
        try:
            return function(import_module(LIBRARIES[self.library].module), self.name, *given, dict(self.options))
        except (OSError, RuntimeError, ValueError) as error:
            if not self.pretrained or isinstance(error, UsageError):
                raise
            raise UsageError(f"model {self}: {failed} ({describe_error(error)}). {{}}", fix) from error


def _fit(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return ``values`` if there is one a channel, else their mean for every channel."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
