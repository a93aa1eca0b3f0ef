"""Which config of the table is the fastest: candidates that compile well, checked, and timed beside the table's."""
