"""Benchmarks of the GDN verify step: one concept a file, used by the scripts beside this folder."""
