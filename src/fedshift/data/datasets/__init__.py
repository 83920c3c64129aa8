"""Benchmarks of the papers: facts in ``cards.toml``, and functions that read the publishers' files.

A benchmark ``name`` is a function ``name(root, **options) -> Federation`` in a module of this package. Its card is the
module's ``CARD``; in modules with several benchmarks, it is the constant with the same name in capitals. ``root`` is
the data directory; files are looked up in ``root/<name>`` and in ``root``. Nothing here uses the network.
"""
