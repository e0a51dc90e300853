"""Memory of earlier work. `pages` hands out the units of key/value memory."""
