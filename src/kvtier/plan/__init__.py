"""What pays: the break-even file with its curves, and the load planner. Pure: no I/O, no clock, times are given."""
