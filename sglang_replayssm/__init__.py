"""Lossless and fast speculative verification for Gated-DeltaNet hybrids in SGLang."""

__version__ = "0.1.0"
