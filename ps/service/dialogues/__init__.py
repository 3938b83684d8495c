"""Dialogues of a PS shard with its clients, one class for each kind of client.

A dialogue has the table of the messages that a client of its kind may send, checks these messages
and queues them for the shard's writer thread. `StreamReader` (ps/service/stream_reader.py) begins a
dialogue after the client's Hello and passes it the client's messages. A new message of a client
needs a row and a method in one dialogue.
"""
