"""SingleSet: every client trains alone and nothing travels; the lower baseline of FedBN's and FedWon's tables."""

from dataclasses import replace

from ..core.method import Method, method
from ..core.selection import Scope, nothing
from ..utils.errors import UsageError


@method
def single(base: Method) -> Method:
    """Let clients of ``base`` load nothing and send nothing."""
    if base.scope != Scope():
        raise UsageError(f"{base.name} decides what is exchanged, but single exchanges nothing: remove one of the two")
    return replace(base, scope=Scope(load=nothing, send=nothing))
