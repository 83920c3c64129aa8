"""The coordinator of an experiment across machines."""
