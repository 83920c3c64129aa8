"""Report: tables, figures and one HTML page, created from a :class:`~fedshift.results.schema.RunSummary`."""

from .differences import compare_methods
from .figures import make_figures, save_figures
from .page import write_page
from .tables import accuracy_table, find_reported_rounds

__all__ = ["accuracy_table", "compare_methods", "find_reported_rounds", "make_figures", "save_figures", "write_page"]
