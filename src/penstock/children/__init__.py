"""children: one way for a process of ours to start another one and to talk to it.

    spawn          starts `python -m MODULE FD` with a socket; describes in a line how a child ended
    lifetime       set-up of a new child: it leaves signals to its parent and ends with it
    frames         msgpack messages with a length header, over a socket: blocking, polled, asyncio
    array_codec    msgpack messages with numpy arrays in them
    carried_error  an error of ours, sent from a child to the process that raises it

docs/children.md lists which process starts which. Knows sockets, bytes and errors; no engine, no
model.
"""
