"""Policies: one file for each way to make a model for a client that never trained.

Every module here defines one function, named like the module, which :func:`fedshift.evaluation.policy.policy` makes a
policy. There is no registry: ``tent`` resolves to ``fedshift.evaluation.policies.tent:tent``, and
``my_package.module:function`` to your function.
"""
