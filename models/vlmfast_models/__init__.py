"""Networks of vlmfast: configurations, geometry, towers, decoders, families and their weights.

Knows tensors and checkpoint formats; knows nothing of tokenizers, sampling, caches or requests. Imports
`vlmfast_kernels` and torch only, and neither at package import.
"""
