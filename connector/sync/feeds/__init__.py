"""Change methods: ways to detect changes in the source, one module each. `feed.py` has the protocol of such a module.

To add a method, write a module and add it to `choose.METHODS` and the matrix of `tests/contracts/test_changes.py`.
Methods read the source, never the store.
"""
