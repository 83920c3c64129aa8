"""Engines carry out the clients' work of a round. They know only the kernel; no method knows which engine runs it.

An engine is a function of the signature :class:`Engine`. It joins the laws in ``tests/laws`` and the command line by
standing in ``fedshift.engines.catalog.ENGINES``.
"""
