"""A vLLM engine driven step by step, for tests and benchmarks."""
