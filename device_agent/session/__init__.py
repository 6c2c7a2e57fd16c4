"""The process that serves one client: its RPC functions, and the session side of one measurement."""
