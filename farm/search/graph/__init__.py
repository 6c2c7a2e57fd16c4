"""From an ONNX file to functions that can be scheduled: the import and the passes of graph pipelines."""
