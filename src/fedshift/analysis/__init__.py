"""Analysis: pure functions over arrays and records, independent of engines."""
