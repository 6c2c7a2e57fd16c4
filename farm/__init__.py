"""The coordinator: boards, campaigns, search, store and reports. The board's side is `device_agent`."""

__version__ = "0.1.0"
