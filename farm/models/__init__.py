"""Models: ONNX files, the zoo, inputs, quantisation. Nothing here imports TVM; that is `farm.search`'s work."""
