"""Result files: reading, comparing, tables and plots."""
