"""What runs inside the server: the functions that patched vLLM calls.

One module per concern, each named in the `Seam:` line of its patch. A module is imported by vLLM's own processes, so
it imports vLLM, torch or FastAPI only inside the function that needs them, and never pins, store or cli.
"""
