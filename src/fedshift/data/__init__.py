"""Federations of clients, their sources, splits, augmentations and samples."""
