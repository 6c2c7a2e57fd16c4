"""The listening process: TVM's RPC handshake, the tracker, and lease fencing."""
