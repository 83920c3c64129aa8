"""SiloBN: batch normalization's affine parameters are averaged, its statistics stay on the client.

Andreux et al. 2020, arXiv:2008.07424.
"""

from ..core.method import Method, method
from ..core.selection import norm_statistics


@method
def silobn(base: Method) -> Method:
    """Keep the running statistics of every BatchNorm layer of ``base`` on the client."""
    return base.keep_on_client(norm_statistics)
