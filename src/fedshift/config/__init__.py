"""User-facing settings: the single source of flags, TOML keys, help and validation."""
