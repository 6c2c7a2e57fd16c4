"""ONNX's own tests of its operators, compiled and run here; `make test-onnx` runs them all."""
