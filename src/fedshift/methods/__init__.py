"""One file a paper; each says only what differs from the method it builds on.

Every module here defines one function, named like the module, that returns a :class:`fedshift.core.method.Method`.
There is no registry: ``fedbn`` resolves to ``fedshift.methods.fedbn:fedbn``, and ``my_package.module:function`` to one
of yours.
"""

from dataclasses import replace

from ..config.catalog import Catalog
from ..config.expressions import tidy
from ..core.method import Method
from ..utils.errors import UsageError
from ..utils.user_code import describe_error, describe_function


def _accept(given: object, text: str | None) -> Method:
    made = given
    if text is None and callable(given) and not isinstance(given, Method):
        try:
            made = given()
        except Exception as error:
            raise UsageError(f"methods: {describe_function(given)} makes none: {describe_error(error)}") from error
    if isinstance(made, Method):
        return made if text is None else replace(made, typed=tidy(text))
    if text is not None:
        raise UsageError(f"method {text!r} made a {type(made).__name__}, not a Method: return fedshift.Method")
    raise UsageError(
        f"methods: {made!r} is none: give texts such as 'fedbn+fedprox(mu=0.1)', methods such as fedshift.fedbn(), or "
        "functions that make one without arguments; several in a list"
    )


METHODS = Catalog[Method](
    "method", "methods", _accept, spell=lambda method: method.name, key=lambda method: method.text, setting="methods"
)
"""Methods by name, which compose: ``fedbn+fedprox(mu=0.1)``."""
