"""The process that serves one client: its RPC functions, and one measurement from its side."""
