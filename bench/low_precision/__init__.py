"""``python -m bench.low_precision``: the error of attention in few bits, on real activations and on drawn ones."""
