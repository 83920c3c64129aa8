"""Foundation of the package: errors, states, keyed random streams, files. Imports nothing else from fedshift."""
