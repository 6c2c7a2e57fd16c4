"""The coordinator's long-running part: tracker, ways to boards, probes, metrics, kept up by one process.

`daemon` is that process; children of its talk TVM's RPC to boards. How commands find or start it is in
`farm.connectivity.services`. Work on boards (campaigns, sweeps) lives elsewhere.
"""
