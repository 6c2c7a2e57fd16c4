"""The coordinator's long-running part: tracker, ways to boards, probes, metrics, kept up by one process.

`daemon` is that process; `prober` is the child that talks TVM's RPC. How commands find or start it is in
`farm.connectivity.services`. Work on boards (campaigns, sweeps) lives elsewhere.
"""
