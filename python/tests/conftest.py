"""Settings of the whole test run."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell starts what runs in the background with ctrl-C ignored, and so would be the programs that the tests
# interrupt. A handler here, of whatever kind, is the default again in what is started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure: --durations shows what takes long. A failing example can be run again from its blob.
settings.register_profile("hyperqwen", deadline=None, print_blob=True)
settings.load_profile("hyperqwen")
