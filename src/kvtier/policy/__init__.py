"""Who stays: eviction, admission, and the registry of policies. Pure: no I/O, no clock."""
