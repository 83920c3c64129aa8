"""The Python interface: comparisons and their results, and method advice."""

from .comparison import Comparison as Comparison
from .runs import compare as compare
from .runs import load_data as load_data
from .runs import read_run as read_run
from .studies import advise as advise
