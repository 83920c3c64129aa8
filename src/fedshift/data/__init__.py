"""Data of clients: in come folders, tables, arrays and data sets, out goes a federation of samples with targets.

To be read in this order, which is that of a value:

1. ``sources``: settings to a federation, by name, path or object; ``readers``: one module for each kind of data, which
   returns a ``source`` (rows, targets, and how they are decoded); ``files`` and ``decoding``: folders, and the values
   of one file, also for exported models and sites; ``columns``: cells of tables as numbers or categories.
2. ``identity``, ``groups``, ``assembly``: one name for each class, group and client; test samples are drawn.
3. ``stores``, ``samples``, ``federation``: rows of arrays in memory or on disk; ``partition``, ``assignment``,
   ``patches``: who has which rows, and what a batch takes of them.
4. ``preparation``, ``augmentation``: stored values to inputs of a network; ``schema``, ``joining``, ``agreement``: data
   of others, prepared alike.
5. ``checks``: what would spoil an experiment; ``datasets``: published data by name.
"""
