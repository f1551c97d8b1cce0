"""hyperqwen: Qwen3.8-27B served fast and honestly on one GPU."""

__version__ = "0.1.0"
