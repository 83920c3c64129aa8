"""A person's own files: directories of images, arrays and tables, read into federations."""
