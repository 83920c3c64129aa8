"""``python -m fedshift``."""

from .cli import main

main()
