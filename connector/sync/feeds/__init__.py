"""Change methods: ways to detect changes in the source, one module each. `feed.py` has the protocol of such a module.

To add a method: write a module here and name it in `choose.METHODS`; name it in `connector.model.ChangeSpec` and in
`app/src/settings/collections.py`; put what it asks of HANA into `connector.protocols.Capture` and `connector/hana/`,
its rights into `connector/hana/privileges.py`, its check for doctor into `app/src/observe/checks.py`; add it to `WAYS`
of `tests/contracts/changing.py` and to `tests/proof/methods.py`. Methods read the source, never the store.
"""
