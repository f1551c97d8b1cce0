"""What surrounds a running engine: its environment, its folders, its port, its process, and a client that asks it."""
