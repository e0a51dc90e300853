"""Arithmetic of vlmfast: every operation as a plain torch function, with faster implementations beside it.

Imports torch only, and not at package import. Layout: `ops/` holds the reference functions (they are the operations),
`cpu/` holds implementations of those operations under the same file names.
"""
