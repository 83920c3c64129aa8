"""Papers: every table and figure of FedBN, FedMMB and FedWon, with the printed values as data.

A key such as ``fedbn/table11`` comes in; runs, a comparison with the printed values and a page go out. Read
``published_tables`` (what was printed), ``recipes`` (settings of a run), ``planning`` (runs of a table),
``measurements`` and ``figures`` (what finished runs give), ``results`` (what is stored), ``comparison``, ``runner``.
"""
