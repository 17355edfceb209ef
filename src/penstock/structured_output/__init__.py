"""structured_output: processes that compute the tokens a grammar allows. For samples with a
structured output, at every step.

The processes and the engine share the mask board (mask_board.py), on which each sample has a place.
Knows grammars, the board and time; no scheduler, no device.
"""
