"""Change methods: ways to detect changes in the source, one module each. `feed.py` has the protocol.

To add a method, write a module with a `ChangeMethod` and add it to `choose.METHODS` and the matrix of
`tests/contracts/test_changes.py`. Methods read the source, never the store.
"""
