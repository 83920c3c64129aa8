"""Readers of user files: directories of images, arrays and tables."""
