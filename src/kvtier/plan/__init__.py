"""Curves; break-even, planner and preload are to come, see docs/roadmap.md. Pure."""
