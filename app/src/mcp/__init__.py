"""Tools for agents over the Model Context Protocol: what they are (`tools`, `answers`), how texts of rows are marked as
data (`untrusted`), the protocol by the official SDK (`server`), and its transports (`stdio`, `http`). The SDK is
imported here and nowhere else; of HTTP frameworks and terminals nothing is known.
"""
