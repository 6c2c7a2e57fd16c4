"""The listening process: TVM's RPC handshake, the tracker, and which lease is the latest."""
