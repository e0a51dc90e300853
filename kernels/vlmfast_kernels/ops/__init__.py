"""Reference operations in plain torch. One file per group of operations; `cpu/` mirrors the file names."""
