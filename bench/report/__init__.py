"""Results: reading, comparing, tables and plots."""
