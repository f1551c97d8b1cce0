"""Settings of the whole test run."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure: --durations shows what takes long. A failing example can be run again from its blob.
settings.register_profile("hyperqwen", deadline=None, print_blob=True)
settings.load_profile("hyperqwen")
