"""Networks of the papers. A model is made by a factory ``make(sample_shape, classes) -> nn.Module``.

Names resolve without a registry: ``digit-cnn-bn`` is ``fedshift.models.digits.digit_cnn_bn``; a user's factory is
``my_package.module:function``. ``unet(width=32)`` sets an option of a factory, and
``take_output(my_package.module:function, output='logits')`` one of several outputs. ``timm:resnet18`` and ``hf:vit``
are networks of installed libraries (:data:`fedshift.models._libraries.LIBRARIES`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from typing_extensions import override

from ..config.catalog import Catalog
from ..config.expressions import list_catalog
from ..nn.several_inputs import Inputs, name_inputs, take_inputs
from ..utils.errors import UsageError
from ..utils.random_streams import kept_generators
from ..utils.user_code import describe_error, describe_function, find_import_path, identify_function
from ._libraries import LIBRARIES, LibraryModel

__all__ = [
    "MODELS", "LibraryModel", "ModelFactory", "NetworksOfInputs", "describe_factory", "make_network", "take_output",
]  # fmt: skip

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""Function that makes a network for the shape of a sample and a number of classes.

For several inputs, the shape is a dictionary of the inputs' shapes by name.
"""


def make_network(model: ModelFactory, shape: tuple[int, ...], classes: int, precision: str = "float32") -> nn.Module:
    """Make the network of ``model`` for a sample's shape and the classes; raise UsageError if the result is none.

    In ``float64``, its parameters and buffers are converted; in other precisions they are unchanged.
    """
    try:
        network = model(shape, classes)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the model cannot be made for samples of shape {getattr(model, 'shapes', shape)} and {classes} classes "
            f"({describe_error(error)}): give a function (sample_shape, classes) -> nn.Module that takes them"
        ).about("model") from error
    if not isinstance(network, nn.Module):
        raise UsageError(
            f"the model's function made a {type(network).__name__}, not a torch.nn.Module: return the network in "
            f"{describe_function(model)}"
        )
    if not _returns_new(model, network, shape, classes):
        network = copy.deepcopy(network)
    if any(nn.parameter.is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        _shape_lazy_layers(network, shape)
    return network.double() if precision == "float64" else network


_NEW: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Functions of users, and whether they make all of a network anew in each call."""


def _returns_new(model: ModelFactory, network: nn.Module, shape: tuple[int, ...], classes: int) -> bool:
    """Return whether ``model`` makes all of ``network`` anew when it is called again: trials train and change it."""
    if isinstance(model, LibraryModel) or getattr(model, "__module__", "").startswith(__name__):
        return True

    def share_none() -> bool:
        with kept_generators():
            other = model(shape, classes)
        return {*network.modules(), *network.parameters()}.isdisjoint({*other.modules(), *other.parameters()})

    try:
        return _NEW[model] if model in _NEW else _NEW.setdefault(model, share_none())
    except TypeError:  # not hashable
        return share_none()


def _shape_lazy_layers(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Give lazy layers their shapes, without moving statistics, by a sample of floats or, failing that, of tokens."""
    failed: Exception | None = None
    floats = next((each.dtype for each in network.parameters() if each.is_floating_point()), torch.float32)
    for dtype in (floats, torch.int64):
        try:
            with torch.no_grad():
                network.eval()(torch.zeros(1, *shape, dtype=dtype))
            return
        except Exception as error:
            failed = failed or error
    raise UsageError(
        f"the model's lazy layers get no shapes from a sample of shape {shape} ({describe_error(failed)}): choose a "  # type: ignore[arg-type]
        "model for this shape, or bring the data to the model's"
    ) from failed


@dataclass(frozen=True)
class _Output:
    """A forward hook that takes one of a network's outputs."""

    output: str | int

    def __call__(self, module: nn.Module, given: object, made: Any) -> Any:
        try:
            by_name = isinstance(self.output, str) and not isinstance(made, Mapping)
            return getattr(made, str(self.output)) if by_name else made[self.output]
        except (LookupError, AttributeError, TypeError) as error:
            has = ", ".join(map(repr, made)) if isinstance(made, Mapping) else None
            has = has or f"{len(made)} of them, from 0" if isinstance(made, tuple | list) else has
            raise UsageError(
                f"take_output: the model {type(module).__name__} returned a {type(made).__name__} without an output "
                f"{self.output!r}: {f'it has {has}' if has else 'leave take_output out where it is a tensor'}"
            ) from error


@dataclass(frozen=True)
class _OutputOf:
    """A factory of networks that return one of the outputs of the networks of ``make``."""

    make: ModelFactory
    output: str | int

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return take_output(self.make(shape, classes), self.output)


@dataclass(frozen=True)
class NetworksOfInputs:
    """A factory of the networks of ``make`` for several ``inputs``, into which they divide rows.

    ``make`` is called with a dictionary of the inputs' shapes by name in place of a sample's shape.
    """

    make: ModelFactory
    inputs: Inputs

    @property
    def shapes(self) -> Any:
        """The shape of each input of a sample, by name."""
        return {each.name: each.shape for each in self.inputs}

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a network that takes rows; :class:`UsageError` if it takes other inputs."""
        known = _spell(self.make) or ""
        if known and (self.make.library != "hf" if isinstance(self.make, LibraryModel) else ":" not in known):
            raise UsageError(
                f"model {known} takes one input, and the data have {name_inputs(self.inputs)}: give a function "
                "(sample_shape, classes) -> nn.Module whose network has parameters of these names"
            ).about("model")
        network = self.make(self.shapes, classes)
        return take_inputs(network, self.inputs) if isinstance(network, nn.Module) else network


N = TypeVar("N", bound=nn.Module)


@overload
def take_output(model: N, output: str | int) -> N: ...
@overload
def take_output(model: ModelFactory, output: str | int) -> ModelFactory: ...
def take_output(model: nn.Module | ModelFactory, output: str | int) -> nn.Module | ModelFactory:
    """Return ``model`` with one of its outputs in place of a dictionary, a tuple or an object of several.

    Names of entries stay what they are, so that published weights load and patterns select.

    Args:
        model: a network, which is changed (a forward hook is added), or a function (sample_shape, classes) that makes
            one.
        output: name of the output, ``"logits"`` of most networks of HuggingFace, or its place, from 0.

    """
    if isinstance(model, nn.Module):
        model.register_forward_hook(_Output(output))
        return model
    return _OutputOf(model, output)


def _accept(model: object, text: str | None) -> ModelFactory:
    if isinstance(model, nn.Module) or not callable(model):
        raise UsageError(
            f"model{'' if text is None else f' {text!r}'} is a {type(model).__name__}: give a name, or a function "
            "(sample_shape, classes) -> nn.Module, which each seed calls for fresh weights"
        ).about("model")
    return model


def _configure(factory: Callable[..., Any], _own: bool) -> Callable[..., ModelFactory]:
    """Return the function that makes a factory with the arguments in an expression."""
    if factory is take_output:
        return factory
    if isinstance(factory, LibraryModel):
        return factory.configure

    def configure(**options: Any) -> ModelFactory:
        return partial(factory, **options) if options else factory

    taken = inspect.signature(factory).parameters.values()
    options = [each for each in taken if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    configure.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return configure


def _spell(model: ModelFactory) -> str | None:
    if isinstance(model, NetworksOfInputs):
        return _spell(model.make)
    if isinstance(model, LibraryModel):
        return str(model)
    if isinstance(model, _OutputOf):
        inner = _spell(model.make)
        return inner and f"{take_output.__name__}({inner}, output={model.output!r})"
    if isinstance(model, partial):
        inner, plain = _spell(model.func), (bool, int, float, str, type(None))
        options = ", ".join(f"{name}={value!r}" for name, value in model.keywords.items())
        known = inner and "(" not in inner and not model.args and isinstance(model.keywords, dict)
        return f"{inner}({options})" if known and all(type(v) in plain for v in model.keywords.values()) else None
    named = (name for name, function in list_catalog("models").items() if function is model)
    return next(named, None) or find_import_path(model)


class _Models(Catalog[ModelFactory]):
    """The networks, and :func:`take_output`, which has a network as its argument."""

    @override
    def find(self, name: str) -> Callable[..., Any]:
        return take_output if name == take_output.__name__ else super().find(name)


MODELS = _Models(
    "model", "models", _accept, adapt=_configure, spell=_spell, key=_spell,
    libraries={library: partial(LibraryModel, library) for library in LIBRARIES},
)  # fmt: skip
"""Networks by name; your own function is called with the shape of a sample and the number of classes."""


def describe_factory(model: ModelFactory) -> str:
    """Return the name of the function that makes networks, as ``--model`` takes it where it can."""
    made = model.make if isinstance(model, NetworksOfInputs) else model
    return MODELS.write(made) or identify_function(made)


def __dir__() -> list[str]:
    return __all__
