"""The Python interface: comparisons and their results, method advice, and the leakage study of uploads."""

from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .comparison import load_data as load_data
from .comparison import read_run as read_run
from .studies import advise as advise
from .studies import leak as leak
