"""Pins say which bytes, never where they come from.

`model` reads them, `fetch` brings them, `update` and `check` keep them.
"""
