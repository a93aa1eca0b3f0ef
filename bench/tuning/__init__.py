"""Find faster configs for the table: candidates that compile well are checked, and timed together with the table's."""
