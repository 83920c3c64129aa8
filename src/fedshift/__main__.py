"""``python -m fedshift``."""

from .cli.app import main

main()
