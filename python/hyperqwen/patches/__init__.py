"""The patch series: read, apply exactly, check, write.

`apply` and `series` need nothing else of the package and use the standard library only, so that a Nix builder
can import them from the source folder.
"""
