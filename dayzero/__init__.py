"""dayzero: from a freshly published checkpoint to an accepted inference service."""

__version__ = "0.1.0"
