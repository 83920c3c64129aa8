"""Execution of calls in this process, in worker processes, or on a Ray cluster."""
