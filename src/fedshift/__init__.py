"""fedshift: federated learning for clients whose data differ, above all in how they look (feature shift)."""

__version__ = "0.1.0"
