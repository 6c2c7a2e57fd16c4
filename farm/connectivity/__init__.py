"""The way to boards and to the services: SSH, tunnels, relay, tracker, keys, and the services' socket."""
