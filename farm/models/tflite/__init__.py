"""Convert TensorFlow Lite models to ONNX: `reading` parses, `graph` writes, `operators` maps each operator."""
