"""Traces, simulated media and a simulated engine around the real control plane."""
