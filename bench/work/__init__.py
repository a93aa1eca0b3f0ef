"""What is timed, and beside which functions."""
