"""Drafting: tokens proposed ahead and verified together, so that the same answer comes in fewer passes."""
