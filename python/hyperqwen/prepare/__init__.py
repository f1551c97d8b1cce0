"""Turn checkpoints into what the engine serves, and make the model that ships with the repository."""
