"""Connections to boards and services: SSH, tunnels, relay, tracker, keys, the services' socket."""
