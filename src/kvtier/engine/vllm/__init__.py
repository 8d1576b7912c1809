"""All that imports vLLM."""
