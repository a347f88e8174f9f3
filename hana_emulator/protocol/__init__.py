"""Codec of HANA's SQL command network protocol, server side. Knows bytes and storage values; never sockets, never SQL."""
