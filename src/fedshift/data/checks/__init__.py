"""Checks of a federation before training: what would make results misleading, and what loading cannot see or say.

A federation comes in, and findings go out. Read :mod:`.quality` first (all checks in order), then :mod:`.findings`,
:mod:`.survey` (the one pass over all samples), and the checks: :mod:`.faults`, :mod:`.duplicates`,
:mod:`.number_faults` and :mod:`.label_leaks`.
"""
