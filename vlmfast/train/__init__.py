"""The bundled pocket model: generated scenes, their questions and answers, and the training recipe.

From the bottom: vocabulary, scenes, render / questions, answers / tokens, checkpoint, dataset / dense, packing, language /
recipe; score asks the runtime. Nothing else in vlmfast imports this package, only the command line does.
"""
