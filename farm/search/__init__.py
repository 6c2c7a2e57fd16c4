"""TVM behind one adapter: import, graph pipeline, workloads, search, cost model, build.

Nothing outside this package (and `farm.artifacts`, `farm.measure.session`) imports tvm. Which workload gets the next
trial, and where it runs, is decided in `farm.campaign`.
"""
