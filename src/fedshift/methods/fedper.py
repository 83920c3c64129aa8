"""FedPer: the last layers stay on the client, the layers below are averaged.

Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms 1 and 2.
"""

from ..core.method import Method, method
from ..core.selection import parse_selection


@method
def fedper(base: Method, *, layers: int | str = 1) -> Method:
    """Keep the last ``layers`` layers of ``base`` on the client, or layers that match a pattern such as ``"head.*"``.

    The last layers are the layers that the model registers last.
    """
    return base.keep_on_client(parse_selection(layers))
