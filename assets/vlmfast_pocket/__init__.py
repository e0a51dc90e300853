"""The small vision-language model that comes with vlmfast: a data package, an ordinary Hugging Face checkpoint folder.

Its card, README.md beside this file, says what it can and can not do.
"""
