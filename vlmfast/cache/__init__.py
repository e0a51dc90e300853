"""Memory of earlier work.

`features` keeps encoded pictures in memory over `disk`, by `key`; `pictures` knows files without decoding them;
`prefix` knows whose keys and values are there already; `pages` hands out the units of their memory. `disk` keeps bytes
in an LMDB `environment` that several processes share.
"""
