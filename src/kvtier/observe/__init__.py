"""Event recorder, counters, profiling hooks. A leaf: any room may import it, it imports none."""
