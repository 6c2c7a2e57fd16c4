"""Models: ONNX and TensorFlow Lite files, the zoo, inputs, quantisation. TVM is imported by `farm.search` alone."""
