"""Authentication and admission of the clients of a listening node.

`credentials` reads certificates, keys and the token, opens protected channels and authenticates
both ends. `connection_guard.ConnectionGuard` admits streams within limits and counts the rejected
streams. `certificates` creates a run's certificates (``thinwire certificates``). A token is never
sent: both ends prove that they have the token.
"""
