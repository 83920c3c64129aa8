"""Checks of data before training: faults (``quality``), shifts between sites (``shifts``), and a search for a method.

Samples come in as a :class:`~fedshift.data.federation.Federation`; findings, tables and sentences go out.
"""

from .shifts import Diagnosis as Diagnosis
from .shifts import diagnose as diagnose
