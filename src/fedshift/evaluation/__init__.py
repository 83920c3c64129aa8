"""Evaluation: counts on each client's splits, communication, and models for unseen clients."""
