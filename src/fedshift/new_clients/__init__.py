"""Trained models for clients that never took part in training: the policies of ``newcomers``, measured side by side.

``site_data``: the new clients' data, prepared like the run's data. ``policies``: the models, their needs, how well they
do, and their files. ``policy_tables``: these results as tables, and the policy that they recommend.
"""
