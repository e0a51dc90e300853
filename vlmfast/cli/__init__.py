"""The command `vlmfast`. The only place that prints; torch is imported when a model is loaded, not before."""
