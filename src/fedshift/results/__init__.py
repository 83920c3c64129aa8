"""Results on disk: run directories, checkpoints, and the schema of measurements."""
