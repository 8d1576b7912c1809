"""The disk tier of one rank: I/O rings, segment store, shared-filesystem store, catalog."""
