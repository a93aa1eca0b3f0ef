"""torch's own functions, composed to the contract of this package."""
