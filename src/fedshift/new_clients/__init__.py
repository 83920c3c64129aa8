"""Trained models for clients that never took part in training: the policies of ``newcomers``, measured side by side.

``site_data``: the new clients' data, prepared like the run's data. ``policies``: the models, their needs, and how well
they do. ``policy_tables``: these results as tables and files.
"""
