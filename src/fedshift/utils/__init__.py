"""What everything stands on: errors, tensor dictionaries, keyed random streams. Imports nothing of fedshift."""
