"""What pays: the break-even file with its curves, the curve of recompute that is learned from steps, and the load planner. Pure: no I/O, no clock, times are given."""
