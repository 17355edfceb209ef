"""children: one way to have a process of ours start another and speak with it.

    spawn          starts `python -m MODULE FD`, with a socket to it; says in one line how one ended
    lifetime       what a child does first: it leaves signals to its parent, and ends with it
    frames         words of msgpack behind their lengths, over a socket: blocking, polled, or on an
    event loop
    array_codec    words with numpy arrays in them
    carried_error  an error of ours on its way from a child to whoever raises it

docs/children.md lists which process starts which. It knows sockets, bytes and errors; no engine, no
model.
"""
