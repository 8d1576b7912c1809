"""The kvtier command: one file a command."""
