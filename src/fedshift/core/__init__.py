"""The kernel: what a federated method is, and the pure steps that every engine carries out."""
