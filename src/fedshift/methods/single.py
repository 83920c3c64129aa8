"""SingleSet: every client trains alone on its own data; the lower baseline in the tables of FedBN and FedWon."""

from dataclasses import replace

from ..core.method import Method, method
from ..core.selection import Scope, nothing
from ..utils.errors import UsageError


@method
def single(base: Method) -> Method:
    """Train the clients of ``base`` without loading or sending any entry."""
    if base.scope != Scope():
        raise UsageError(f"{base.name} selects exchanged entries, but single exchanges nothing: remove one of the two")
    return replace(base, scope=Scope(load=nothing, send=nothing))
