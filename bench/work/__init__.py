"""The work to time, and the functions to compare with."""
