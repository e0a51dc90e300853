"""Fewer visual tokens: how many, which are kept, which are merged. Knows a picture as tokens [N, E], nothing else."""
