"""Tiers below the engine: dram, disk, remote."""
