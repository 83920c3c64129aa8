"""Shifts between sites (``shifts``), a search for a method (``search``), and pictures of data (``overview``).

Samples come in as a :class:`~fedshift.data.federation.Federation`; findings, tables and sentences go out.
"""

from .shifts import Diagnosis as Diagnosis
from .shifts import diagnose as diagnose
