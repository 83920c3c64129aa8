"""Report: tables, figures and one HTML page, made from a :class:`~fedshift.records.Study` alone."""

from .claims import difference_table
from .figures import figures, save_figures
from .page import write_page
from .tables import accuracy_table, reported_rounds

__all__ = ["accuracy_table", "difference_table", "figures", "reported_rounds", "save_figures", "write_page"]
