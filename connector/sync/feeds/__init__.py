"""Change methods: ways to detect changes in the source, one module each. `feed.py` has their protocol.

To add a method: write a module here; add its name to `choose.METHODS`, `connector.model.ChangeSpec` and
`app/src/settings/collections.py`; add its HANA calls to `connector.protocols.Capture` and `connector/hana/`, its
privileges to `connector/hana/privileges.py`, its `doctor` check to `app/src/observe/checks.py`; add it to `WAYS` in
`tests/contracts/changing.py` and to `tests/proof/methods.py`. Methods read the source, never the store.
"""
