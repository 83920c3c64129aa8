"""Experiments: methods x seeds as trials, queued, checkpointed, resumed and restored."""
