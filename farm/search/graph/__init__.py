"""From an ONNX file to functions to schedule: import, and the passes of graph pipelines."""
