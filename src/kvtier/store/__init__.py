"""TieredStore: index, leases, moves, deadlines; the actions and outcomes that the planes exchange. Pure."""
