"""The bundled pocket model: generated scenes, their questions and answers, and the training recipe.

From the bottom: vocabulary / scenes / render, questions, answers / truth, tally, score (what scoring needs: no torch) /
frames, tokens, packing, alignment, attention, optimise, shape, initial / dense, language, evaluate / export,
recipe. Nothing else in vlmfast imports this package, only the command line does.
"""
