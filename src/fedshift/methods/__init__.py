"""Federated methods, one module per paper; each defines only the difference from its base method.

Every module here defines one function with the module's name that returns a :class:`fedshift.core.method.Method`.
There is no registry: ``fedbn`` resolves to ``fedshift.methods.fedbn:fedbn``, and ``my_package.module:function`` to a
user-defined function.
"""

from dataclasses import replace

from ..config.catalog import Catalog
from ..config.expressions import tidy
from ..core.method import Method
from ..utils.errors import UsageError
from ..utils.user_code import describe_error, describe_function


def _accept(value: object, text: str | None) -> Method:
    method = value
    if text is None and callable(value) and not isinstance(value, Method):
        try:
            method = value()
        except Exception as error:
            raise UsageError(f"methods: {describe_function(value)} failed: {describe_error(error)}") from error
    if isinstance(method, Method):
        return method if text is None else replace(method, typed=tidy(text))
    if text is not None:
        raise UsageError(f"method {text!r} returned a {type(method).__name__}, not a Method: return fedshift.Method")
    raise UsageError(
        f"methods: {method!r} is not a method: give texts such as 'fedbn+fedprox(mu=0.1)', methods such as "
        "fedshift.fedbn(), or functions that return one without arguments; several in a list"
    )


METHODS = Catalog[Method](
    "method", "methods", _accept, spell=lambda method: method.name, key=lambda method: method.text, setting="methods"
)
"""Methods by name, which compose: ``fedbn+fedprox(mu=0.1)``."""
