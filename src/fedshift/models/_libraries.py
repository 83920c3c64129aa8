"""Networks of installed libraries by name, with random weights: ``timm:resnet18``, ``monai:UNet(channels=(8, 16))``.

Each is made for the samples' channels and the number of classes by the library's own function; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

from torch import nn

from ..utils.errors import Ref, UsageError


def _timm(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    return library.create_model(name, in_chans=shape[0], num_classes=classes, **options)  # type: ignore[no-any-return]


def _torchvision(library: Any, name: str, _: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    takes = signature(library.get_model_builder(name)).parameters
    backbone = {"weights_backbone": None} if "weights_backbone" in takes else {}  # else it would be downloaded
    return library.get_model(name, num_classes=classes, **backbone, **options)  # type: ignore[no-any-return]


def _monai(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    given: dict[str, Any] = {"spatial_dims": len(shape) - 1, "in_channels": shape[0], "out_channels": classes}
    return getattr(library, name)(**{**given, **options})  # type: ignore[no-any-return]


def _smp(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    given: dict[str, Any] = {"encoder_weights": None, "in_channels": shape[0], "classes": classes}
    return getattr(library, name)(**{**given, **options})  # type: ignore[no-any-return]


def _take_logits(_module: nn.Module, _given: object, made: Any) -> Any:
    return made.logits


def _hf(library: Any, name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    images = len(shape) == 3
    given: dict[str, Any] = {"num_labels": classes, **({"num_channels": shape[0]} if images else {}), **options}
    kind = library.AutoModelForImageClassification if images else library.AutoModelForSequenceClassification
    network: nn.Module = kind.from_config(library.AutoConfig.for_model(name, **given))
    network.register_forward_hook(_take_logits)
    return network


LIBRARIES: Mapping[str, tuple[str, str, Callable[..., nn.Module]]] = {
    "timm": ("timm", "timm", _timm),
    "torchvision": ("torchvision.models", "torchvision", _torchvision),
    "monai": ("monai.networks.nets", "monai", _monai),
    "smp": ("segmentation_models_pytorch", "segmentation-models-pytorch", _smp),
    "hf": ("transformers", "transformers", _hf),
}
"""By prefix: the module of the networks, the package to install, and the function that makes one."""


@dataclass(frozen=True)
class LibraryModel:
    """A factory of the networks that a library has under ``name``; ``options``: more arguments for them.

    Raises :class:`UsageError` if the library is absent, or if an argument asks for pretrained weights.
    """

    library: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        module, package, _ = LIBRARIES[self.library]
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise UsageError(f"model {self} needs the package {package}: pip install {package}") from error
        for name, value in self.options:
            if name in ("pretrained", "weights", "encoder_weights", "weights_backbone") and value:
                raise UsageError(
                    f"model {self}: networks start from random weights, and {name} downloads others: leave it out, and "
                    "give a file of weights ({})",
                    Ref("weights"),
                )

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.library}:{self.name}" + f"({options})" * bool(options)

    def configure(self, **options: Any) -> LibraryModel:
        """Return the factory with ``options``."""
        return LibraryModel(self.library, self.name, tuple(options.items()))

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Make a network for samples of ``shape``, channels first, or of tokens, and ``classes``."""
        module, _, make = LIBRARIES[self.library]
        return make(import_module(module), self.name, shape, classes, dict(self.options))
