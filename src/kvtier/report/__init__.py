"""Pictures and pages from recordings, metrics and simulations."""
