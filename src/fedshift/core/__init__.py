"""The kernel: the definition of federated methods, and the pure steps that every engine runs."""
