"""`verify`: a checkpoint's run here against transformers', stage by stage, and where they part.

Both sides get the same ids and pixels (ours), so that each stage is judged by itself: ids and pixels against what
transformers' own processor makes, the networks against its networks. The networks are never in memory together: ours
run first and leave their activations, transformers' are compared with these as they pass.
"""
