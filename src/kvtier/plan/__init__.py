"""Curves, break-even, planner, preload. Pure. Nothing is here yet: see docs/roadmap.md."""
