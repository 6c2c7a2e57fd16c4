"""The farm's version. It imports nothing else, so that reading the version is quick."""

__version__ = "0.2.0"
