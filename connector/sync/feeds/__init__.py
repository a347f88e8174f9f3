"""Change methods: ways to find what changed in the source, one module each. `feed.py` has the protocol.

A new method is a module with a `ChangeMethod`, an entry in `choose.METHODS` and in the matrix of
`tests/contracts/test_changes.py`. Methods read the source, never the store.
"""
