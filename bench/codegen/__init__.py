"""The machine code of every launch: cross-compiled without a GPU, judged, and compared with a committed baseline."""
