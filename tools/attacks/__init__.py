"""Attacks on Tastemaker from outside: real commands, real sockets, real files. `tools/redteam.py` runs them."""
