"""Figures and how they are come by: `side_by_side` takes turns, `report` says what came of it, `machine`
on what; `embed`, `search`, `sync` and `serve` measure; `peers` runs other engines, each in an environment of its own.
"""
