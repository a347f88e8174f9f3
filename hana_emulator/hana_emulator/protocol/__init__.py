"""Codec of HANA's SQL command network protocol, server side. Knows bytes and storage values; no sockets, no SQL."""
