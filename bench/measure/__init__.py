"""What bench/foundation.py is made of. Runs on a bare Python 3.9 (standard library only)."""
