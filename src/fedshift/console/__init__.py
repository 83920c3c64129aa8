"""The terminal: progress displays, interruption by Ctrl-C, and output shared by commands."""
