"""children: starts child processes and exchanges messages with them.

    spawn          starts `python -m MODULE FD` with a socket; describes in a line how a child ended
    lifetime       set-up of a new child: it ignores Ctrl-C and SIGTERM, and ends with its parent
    frames         msgpack messages with a length header, over a socket: blocking, polled, asyncio
    array_codec    msgpack messages with numpy arrays in them
    carried_error  a PenstockError as a message, for the receiving process to raise

docs/children.md lists which of Penstock's processes starts which others. Knows sockets, bytes and
errors; no engine, no model.
"""
