"""Authentication and admission of the clients of a listening node.

The module `credentials` reads certificates, keys and the token, opens protected gRPC channels and
authenticates both ends. `connection_guard.ConnectionGuard` admits streams within limits and counts
the rejected streams. The module `certificates` creates a run's certificates (command ``thinwire
certificates``). A run's token is never sent: client and server prove to each other that they have
the token.
"""
