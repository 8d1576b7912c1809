"""Engine adapters: what connects the two planes to an inference engine, or to a library user."""
