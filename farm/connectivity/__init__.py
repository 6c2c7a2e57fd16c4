"""Connections to boards and services: SSH, tunnels, TVM's RPC, tracker, keys, the services' socket."""
