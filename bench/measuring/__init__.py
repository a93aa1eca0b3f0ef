"""Stopwatches, rounds, ceilings, and the check before a timing."""
