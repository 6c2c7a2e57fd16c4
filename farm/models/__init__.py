"""What the user brings: ONNX files and the zoo. Nothing here imports TVM; that is `farm.search`'s work."""
