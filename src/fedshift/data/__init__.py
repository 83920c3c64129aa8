"""Sources, federations and batches: where the clients' samples come from and in which order they are used."""
