"""Parts for existing Flower apps: a strategy, a mod that keeps local entries, drop-in helpers."""
