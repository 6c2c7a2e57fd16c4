"""From an ONNX file to functions that schedules are written for: import, and the passes of graph pipelines."""
