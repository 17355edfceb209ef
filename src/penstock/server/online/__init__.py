"""The online path: a request from its head to its answer."""
