"""One file a paper; each says only what differs from the method it builds on.

Every module here defines one function, named like the module, that returns a :class:`fedshift.core.method.Method`.
There is no registry: ``fedbn`` resolves to ``fedshift.methods.fedbn:fedbn``, and ``my_package.module:function`` to one
of yours.
"""
