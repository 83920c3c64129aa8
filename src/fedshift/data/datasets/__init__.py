"""Benchmarks of the papers: facts in ``cards.toml``, and functions that read the publishers' files.

A benchmark ``name`` is a function ``name(root, **options) -> Federation`` of a module here, whose card is the module's
``CARD``, or the constant of the same name in capitals in modules with several. ``root`` is the directory of the data;
files are looked for in ``root/<name>`` and in ``root``. Nothing here uses the network.
"""
