"""The command line: one module for each command."""

from .app import main as main
