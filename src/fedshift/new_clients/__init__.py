"""Trained models brought to clients that they never saw: each policy of ``newcomers``, measured beside the others.

``site``: the new clients' data, prepared as the run's own were.
``policies``: the models, what each needs, and what it gets right. ``tables``: that as tables and files.
"""
