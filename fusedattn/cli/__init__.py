"""The command line: ``python -m fusedattn {demo,check,info}``."""
