"""The online path: a request from its headers to its answer."""
