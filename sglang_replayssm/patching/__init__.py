"""The other way in: a patch series for a source tree of SGLang, its safe application, and the seams it calls.

A patched tree imports `seam` from here at its start: keep this package free of torch and of SGLang.
"""
