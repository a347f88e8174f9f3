"""How good is the search of a collection: labelled queries and their figures, one report against another, and what an
index loses. Knows search only as functions it is given; no HTTP and no terminal.
"""
