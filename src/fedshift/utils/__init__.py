"""Foundation of the package: errors, states, keyed random streams, files. Imports nothing of fedshift."""
