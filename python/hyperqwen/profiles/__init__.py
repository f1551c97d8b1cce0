"""Profiles: what a server is to be, as typed data. `profile` reads one and turns it into the engine's flags."""
