"""The services of `farm up`: tracker, connections to boards, probes, metrics, the doctor and certificates.

`daemon` is that process; children of its talk TVM's RPC to boards. How commands find or start it is in
`farm.connectivity.services`. Work on boards (campaigns, sweeps) lives elsewhere.
"""
