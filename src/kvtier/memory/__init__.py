"""Bytes in memory: the arena of slots, and the bounded byte store."""
