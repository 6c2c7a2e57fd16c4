"""Convert TensorFlow Lite models to ONNX: `reading` parses, `graph` writes, `operators` maps each operator.

TVM's own front end lacks custom operators and sparse weights of 16 bits, and its NHWC convolutions reach no schedule
family. As ONNX, models share records, batches, quantisation and the reference with all others.
"""
