"""The terminal: progress displays, interruption by Ctrl-C, and the run that a command shows."""
