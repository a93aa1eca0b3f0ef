"""``python -m fusedattn.distributed.example``: processes train one GPT, and each has some of the tokens."""
