"""Analysis: pure functions over arrays and records; they know no engine."""
