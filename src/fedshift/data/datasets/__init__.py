"""The papers' benchmarks, one file each: a card that says what it is, and a function that reads the publisher's files.

A benchmark ``name`` is the function ``name`` of a module here, ``name(root, **choices) -> Federation``, beside the
module's ``CARD``. ``root`` is the directory in which the person keeps data; files are looked for in ``root/<name>``
and in ``root`` itself. Nothing here reaches for the network.
"""
