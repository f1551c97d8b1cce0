"""What runs inside the server: the functions that patched vLLM calls.

One module per concern; the `Seam:` line of a patch names the function it hands over to. These modules are imported by
vLLM's own processes: what a patch calls while vLLM starts imports no vLLM, torch or FastAPI at its top, and none ever
imports pins, store or cli.
"""
