"""The parts of soak.py, one concept a file."""
