"""A site of an experiment across machines: one client's data and state."""
