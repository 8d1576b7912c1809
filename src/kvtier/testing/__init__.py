"""Shipped for others too: conformance suites, fake media, seeded faults, clock."""
