"""Ways to find what changed in the source, one module each, behind the interface of `feed`. They know the source, never
the store: what is stored already is the business of `reconcile`.
"""
