"""The services of `farm up`: tracker, connections to boards, probes, metrics and the doctor.

`daemon` is the process; its children talk TVM's RPC to boards. Commands find and start it with
`farm.connectivity.services`.
"""
